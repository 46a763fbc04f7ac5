# SPDX-License-Identifier: Apache-2.0
"""Change a picture as a prompt says, with the ranks started from here.

    python qwen_image_edit.py --vae-patch-parallel-size 2 --image harbour.jpg --prompt "the same harbour at night"

The ranks are processes of this machine and end with the program.
"""

import argparse
from pathlib import Path

from PIL import Image, ImageOps

from vllm_omni_vae import DiffusionParallelConfig, Omni


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Change a picture as a prompt says.")
    parser.add_argument("--model", default="Qwen/Qwen-Image-Edit-2509", help="folder, or name on the hub")
    parser.add_argument("--image", type=Path, action="append", required=True, help="again for each further picture")
    parser.add_argument("--prompt", default="the same harbour at night")
    parser.add_argument("--width", type=int, help="pixels; in the aspect of the picture when left out")
    parser.add_argument("--height", type=int)
    parser.add_argument("--num-images", type=int, default=1, help="made one after the other, with seeds that follow")
    parser.add_argument("--num-inference-steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vae-patch-parallel-size", type=int, default=2, help="ranks that share the VAE")
    parser.add_argument("--vae-tile-size", help="HxW in pixels; the model family's when left out")
    parser.add_argument("--vae-tile-stride", help="HxW in pixels, at most the size")
    parser.add_argument("--out", type=Path, default=Path("edited.png"))
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
            images=[ImageOps.exif_transpose(Image.open(path)) for path in args.image],
            width=args.width,
            height=args.height,
            num_images=args.num_images,
            num_inference_steps=args.num_inference_steps,
            seed=args.seed,
        )
    for place, pixels in enumerate(result.frames):
        path = args.out if place == 0 else args.out.with_stem(f"{args.out.stem}-{place}")
        Image.fromarray(pixels).save(path)
        print(f"saved {path}: {pixels.shape[1]}x{pixels.shape[0]}, seed {result.seed + place}")
    for decision in result.decisions:
        grid, share = "x".join(map(str, decision["grid"])), list(decision["tiles_per_rank"])
        print(f"VAE {decision['operation']}: {decision['strategy']} {grid}, tiles per rank {share}")
    for stage, seconds in result.stage_durations.items():
        print(f"{stage:8} {seconds:8.2f} s")


if __name__ == "__main__":
    main()
