"""Publishes a drafter on the Hub: weights, the code to load and decode with it, records and a model card.

The repository needs nothing else of ours. Pushing the same content again changes nothing; an interrupted push goes on
where it stopped when it is started again. Log in with `hf auth login`, or set HF_TOKEN. --dry-run writes the folder and
contacts nobody. With --space, the demo of a drafter goes up as a Gradio Space instead.
"""

import argparse
from pathlib import Path

EXAMPLE = "moa push checkpoints/smollm2-135m-instruct-moa my-name/smollm2-135m-instruct-moa --private"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="folder of the drafter")
    parser.add_argument("repository", help="NAMESPACE/NAME")
    parser.add_argument("--private", action="store_true", default=None, help="of a repository that is new")
    parser.add_argument("--revision", metavar="NAME", help="push to this branch, made when it does not exist")
    parser.add_argument("--dry-run", action="store_true", help="write the folder and show what would go up")
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="of the dry run (default: NAME-dry-run in this folder)"
    )
    parser.add_argument(
        "--standalone", action="store_true", help="with its own copy of the target's parts, for clients without one"
    )
    parser.add_argument(
        "--target",
        metavar="NAME",
        help="the target's repository on the Hub, where the checkpoint has another name for it; with --standalone, "
        "a folder or repository to load it from (default: SmolLM2-135M-Instruct, installed)",
    )
    parser.add_argument("--force", action="store_true", help="overwrite a repository that is something else")
    parser.add_argument("--space", action="store_true", help="push the demo with this drafter as a Gradio Space")
    parser.add_argument("--zero-gpu", action="store_true", help="with --space: for ZeroGPU instead of a small CPU")


def run(args: argparse.Namespace) -> None:
    from ..generation import attach
    from ..hub.push import load_checkpoint, push_drafter, write_folder
    from ..hub.remote import check_repo_id
    from ..hub.space import push_space, write_space
    from ..targets import load_target, quiet

    check_repo_id(args.repository)
    if (args.zero_gpu and not args.space) or (args.space and args.standalone):
        raise ValueError("--zero-gpu goes with --space only, and --standalone without it.")
    with quiet():
        drafter = load_checkpoint(args.checkpoint)
    folder = args.output or Path(f"{args.repository.split('/')[1]}-dry-run")
    online = {"private": args.private, "revision": args.revision, "force": args.force}
    if args.space:
        if args.dry_run:
            files = write_space(drafter, folder, args.repository, zero_gpu=args.zero_gpu)
        else:
            pushed = push_space(drafter, args.repository, zero_gpu=args.zero_gpu, **online)
    else:
        if args.standalone:
            target, _ = load_target(args.target, drafter.dtype)
            attach(target, drafter)
        name = args.target if args.target and not Path(args.target).exists() else None
        made = {"records": args.checkpoint, "standalone": args.standalone, "target_name": name}
        with quiet():
            if args.dry_run:
                files = write_folder(drafter, folder, args.repository, **made)
            else:
                pushed = push_drafter(drafter, args.repository, **made, **online)
    if args.dry_run:
        for path in files:
            print(f"{path.stat().st_size:>12,}  {path.relative_to(folder).as_posix()}")
        total = sum(path.stat().st_size for path in files)
        print(f"{total:>12,}  bytes in {len(files)} files would go to {args.repository}; they are in {folder}")
    elif pushed.changed:
        print(f"{pushed.url} (commit {pushed.commit})")
    else:
        print(f"{pushed.url} holds exactly this already (commit {pushed.commit}): nothing was changed")
