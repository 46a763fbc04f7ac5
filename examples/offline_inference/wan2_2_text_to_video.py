# SPDX-License-Identifier: Apache-2.0
"""Make a video from a prompt, with the ranks started from here.

    python wan2_2_text_to_video.py --vae-patch-parallel-size 2 --prompt "a boat leaves the harbour"

The ranks are processes of this machine and end with the program.
"""

import argparse
from pathlib import Path

from vllm_omni_vae import DiffusionParallelConfig, Omni
from vllm_omni_vae.server.media import encode_video


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make a video from a prompt.")
    parser.add_argument("--model", default="Wan-AI/Wan2.2-T2V-A14B-Diffusers", help="folder, or name on the hub")
    parser.add_argument("--prompt", default="a boat leaves the harbour")
    parser.add_argument("--width", type=int, default=832)
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--num-frames", type=int, default=81, help="1 + 4k frames")
    parser.add_argument("--num-inference-steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vae-patch-parallel-size", type=int, default=2, help="ranks that share the VAE")
    parser.add_argument("--vae-tile-size", help="HxW in pixels; the model family's when left out")
    parser.add_argument("--vae-tile-stride", help="HxW in pixels, at most the size")
    parser.add_argument("--out", type=Path, default=Path("video.mp4"))
    return parser.parse_args()


def main() -> None:
    args = arguments()
    parallel = DiffusionParallelConfig(vae_patch_parallel_size=args.vae_patch_parallel_size)
    with Omni(
        model=args.model,
        parallel_config=parallel,
        vae_use_tiling=True,
        vae_tile_size=args.vae_tile_size,
        vae_tile_stride=args.vae_tile_stride,
    ) as omni:
        result = omni.generate(
            args.prompt,
            width=args.width,
            height=args.height,
            num_frames=args.num_frames,
            num_inference_steps=args.num_inference_steps,
            seed=args.seed,
        )
    encode_video(result.frames, args.out, fps=result.fps)
    frames, height, width, _ = result.frames.shape
    print(f"saved {args.out}: {width}x{height}, {frames} frames, seed {result.seed}")
    for decision in result.decisions:
        grid, share = "x".join(map(str, decision["grid"])), list(decision["tiles_per_rank"])
        print(f"VAE {decision['operation']}: {decision['strategy']} {grid}, tiles per rank {share}")
    for stage, seconds in result.stage_durations.items():
        print(f"{stage:8} {seconds:8.2f} s")


if __name__ == "__main__":
    main()
