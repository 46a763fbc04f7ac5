# SPDX-License-Identifier: Apache-2.0
"""Share the VAE of a diffusers pipeline that this script loads itself.

    torchrun --nproc-per-node 2 diffusers_distribute.py --prompt "a boat leaves the harbour"

Every rank runs the whole pipeline; they share the work of the VAE alone, and the first rank gets the clip.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import WanPipeline

from vllm_omni_vae import distribute
from vllm_omni_vae.server.media import encode_video


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Share the VAE of a diffusers pipeline under torchrun.")
    parser.add_argument("--model", default="Wan-AI/Wan2.2-TI2V-5B-Diffusers", help="folder, or name on the hub")
    parser.add_argument("--prompt", default="a boat leaves the harbour")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=704)
    parser.add_argument("--num-frames", type=int, default=121, help="1 + 4k frames")
    parser.add_argument("--num-inference-steps", type=int, default=50)
    parser.add_argument("--fps", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tile-size", type=int, help="pixels, for height and width; the VAE's own when left out")
    parser.add_argument("--tile-stride", type=int, help="pixels, at most the size")
    parser.add_argument("--out", type=Path, default=Path("video.mp4"))
    return parser.parse_args()


def main() -> None:
    args = arguments()
    device, dtype = torch.device("cpu"), torch.float32
    if torch.cuda.is_available():
        device, dtype = torch.device("cuda", int(os.environ["LOCAL_RANK"])), torch.bfloat16
        torch.cuda.set_device(device)
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()

    pipe = WanPipeline.from_pretrained(args.model, dtype={"vae": torch.float32, "default": dtype}).to(device)
    pipe.set_progress_bar_config(disable=rank > 0)
    pipe.vae.enable_tiling(args.tile_size, args.tile_size, args.tile_stride, args.tile_stride)
    pipe.vae = distribute(pipe.vae, size=size)
    output = pipe(
        args.prompt,
        height=args.height,
        width=args.width,
        num_frames=args.num_frames,
        num_inference_steps=args.num_inference_steps,
        generator=torch.Generator().manual_seed(args.seed),  # the same on every rank
        output_type="np",
    )
    if rank == 0:
        frames = (output.frames[0] * 255).round().astype("uint8")
        encode_video(frames, args.out, fps=args.fps)
        print(f"saved {args.out}: {args.width}x{args.height}, {len(frames)} frames, VAE on {size} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
