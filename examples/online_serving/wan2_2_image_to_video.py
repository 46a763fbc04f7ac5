# SPDX-License-Identifier: Apache-2.0
"""Ask a running server for a video that begins with a picture, watch it being made, and save it.

    vllm-omni-vae serve Wan-AI/Wan2.2-I2V-A14B-Diffusers --vae-patch-parallel-size 2
    python wan2_2_image_to_video.py --image harbour.jpg --prompt "a boat leaves the harbour"

The server and this program can run on different machines; see ``--base-url``.
"""

import argparse
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import openai

POLL_SECONDS = 0.5


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make a video from a picture on a running server.")
    parser.add_argument("--base-url", default="http://localhost:8000/v1", help="where the server is")
    parser.add_argument("--api-key", default="none", help="one of the server's --api-key")
    parser.add_argument("--model", help="a name that the server serves; may be left out")
    parser.add_argument("--image", type=Path, required=True, help="PNG, JPEG or WebP; the first frame")
    parser.add_argument("--prompt", default="a boat leaves the harbour")
    parser.add_argument("--size", default="832x480", help="WIDTHxHEIGHT in pixels")
    parser.add_argument("--num-frames", type=int, default=81, help="1 + 4k frames")
    parser.add_argument("--fps", type=int, default=16)
    parser.add_argument("--num-inference-steps", type=int, default=40)
    parser.add_argument("--reference-fit", choices=("crop", "pad"), default="crop", help="how the picture fits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("video.mp4"))
    return parser.parse_args()


def main() -> None:
    args = arguments()
    warnings.filterwarnings("ignore", "The Sora API", DeprecationWarning)
    client = openai.OpenAI(base_url=args.base_url, api_key=args.api_key)
    size: Any = args.size  # the client's types know OpenAI's own sizes only
    job = client.videos.create(
        prompt=args.prompt,
        size=size,
        input_reference=args.image,
        # What the client has no argument for travels in extra_body.
        extra_body={
            "num_frames": args.num_frames,
            "fps": args.fps,
            "num_inference_steps": args.num_inference_steps,
            "seed": args.seed,
            "extra_params": {"reference_fit": args.reference_fit},
        },
        **({"model": args.model} if args.model else {}),
    )
    shown = None
    while job.status in ("queued", "in_progress"):
        if (job.status, job.progress) != shown:
            shown = (job.status, job.progress)
            print(f"{job.status} {job.progress} %", flush=True)
        time.sleep(POLL_SECONDS)
        job = client.videos.retrieve(job.id)
    if job.error is not None:
        sys.exit(f"{job.error.code}: {job.error.message}")

    client.videos.download_content(job.id).write_to_file(args.out)
    details: Any = job  # fields beyond OpenAI's
    print(f"saved {args.out}: {job.size}, {details.num_frames} frames, seed {details.seed}")
    for decision in details.vae:
        grid, share = "x".join(map(str, decision["grid"])), decision["tiles_per_rank"]
        print(f"VAE {decision['operation']}: {decision['strategy']} {grid}, tiles per rank {share}")
    for stage, seconds in details.stage_durations.items():
        print(f"{stage:8} {seconds:8.2f} s")


if __name__ == "__main__":
    main()
