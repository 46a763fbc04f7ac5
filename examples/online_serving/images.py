# SPDX-License-Identifier: Apache-2.0
"""Ask a running server for images, or for one changed as the prompt says, and save them.

    vllm-omni-vae serve Qwen/Qwen-Image --vae-patch-parallel-size 2
    python images.py --prompt "a boat leaves the harbour" --n 2

The server and this program can run on different machines; see ``--base-url``.
"""

import argparse
import base64
import sys
from pathlib import Path
from typing import Any

import openai


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make images on a running server.")
    parser.add_argument("--base-url", default="http://localhost:8000/v1", help="where the server is")
    parser.add_argument("--api-key", default="none", help="one of the server's --api-key")
    parser.add_argument("--model", help="a name that the server serves; may be left out")
    parser.add_argument("--prompt", default="a boat leaves the harbour")
    parser.add_argument("--image", type=Path, action="append", help="PNG, JPEG or WebP to change; may be repeated")
    parser.add_argument("--mask", type=Path, help="where the first image may change: transparent, or else white")
    parser.add_argument("--size", default="auto", help="WIDTHxHEIGHT in pixels, or auto")
    parser.add_argument("--n", type=int, default=1, help="how many images")
    parser.add_argument("--num-inference-steps", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-format", choices=("png", "jpeg", "webp"), default="png")
    parser.add_argument("--out", default="image", help="beginning of the files' names")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.mask and not args.image:
        sys.exit("--mask belongs to an --image")
    client = openai.OpenAI(base_url=args.base_url, api_key=args.api_key)
    asked: dict[str, Any] = {
        "prompt": args.prompt,
        "n": args.n,
        "size": args.size,
        "output_format": args.output_format,
        "stream": True,
        # What the client has no argument for travels in extra_body.
        "extra_body": {"seed": args.seed, "num_inference_steps": args.num_inference_steps},
    }
    if args.model:
        asked["model"] = args.model
    if args.image:
        asked |= {"image": args.image} | ({"mask": args.mask} if args.mask else {})
        events: Any = client.images.edit(**asked)
    else:
        events = client.images.generate(**asked)
    for number, event in enumerate(events):
        path = Path(f"{args.out}-{number}.{event.output_format}")
        path.write_bytes(base64.b64decode(event.b64_json))
        print(f"saved {path}: {event.size}, seed {event.seed}, {event.background}")


if __name__ == "__main__":
    main()
