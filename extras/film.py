"""The README's animation: one episode before training and one after it, side by side.

    python extras/film.py runs/NAME    takes the options of `eval.py run`; --episodes 1 is the default

writes film-SEED.gif for each episode into runs/NAME, or into --out FOLDER.
"""

import io
import sys
import textwrap
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from page import OUTCOMES, record  # noqa: E402

import eval as evaluation  # noqa: E402
import vldac  # noqa: E402
from envs import UserError, check, exit_with  # noqa: E402


def thought_of(response) -> str:
    """What a response says before its action.

    >>> thought_of('{"thoughts": "it is close",\\n "action": "move forward"}')
    'it is close'
    """
    return vldac.ACTION_KEY.split(response)[0].split('"thoughts"')[-1].strip(' \n:{}",')


def panel(title, recording, k):
    """Step k of an episode, or how it ended: a frame, and under it what was thought and done."""
    number = min(k + 1, len(recording.moments))
    if k < len(recording.moments):
        moment = recording.moments[k]
        frame, step = moment.image, moment.step
        thought = thought_of(step.text)
        action = step.action or "(no admissible action)"
        color = "blue" if step.action else "red"
    else:
        frame = recording.last_image
        thought = f"return {recording.result['return']:.2f}"
        action, color = OUTCOMES[recording.result["success"]]
    image = Image.open(io.BytesIO(frame))
    height = round(420 * image.height / image.width)
    canvas = Image.new("RGB", (430, height + 175), "white")
    canvas.paste(image.resize((420, height), Image.Resampling.BOX), (5, 40))
    draw = ImageDraw.Draw(canvas)
    font = ImageFont.load_default(size=26)

    def write(y, text, color):
        lines = textwrap.wrap(text, 30)[:2]
        text = "\n".join(lines).encode("ascii", "replace").decode()  # the font has no other letters
        draw.text((8, y), text, color, font=font)

    write(5, f"{title}, step {number}", "black")
    write(height + 45, thought, "black")
    write(height + 110, action, color)
    return canvas


def animate(before, after, path):
    """Two episodes of a seed, side by side, until the second has ended; then how both ended."""
    last = len(after.moments) - 1
    steps = np.linspace(0, last, min(24, last + 1))  # at most 24 of them
    steps = steps.round().astype(int)
    pictures = []
    for k in [*steps, 10**9]:
        left = panel("before", before, k)
        right = panel("after", after, k)
        picture = Image.new("RGB", (left.width + right.width, left.height), "white")
        picture.paste(left, (0, 0))
        picture.paste(right, (left.width, 0))
        pictures.append(picture)
    durations = [400] * len(steps) + [2400]  # milliseconds
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=durations, loop=0)
    print(path)


def main(folder, *options):
    try:
        args, checkpoint = evaluation.options_of_run("run", Path(folder), options, episodes=1)
        check(checkpoint, "a film shows the run's own start and end: it takes no --adapter")
        _, before = record("start", args)
        _, after = record("run", args, checkpoint)
        out = Path(args.out or folder)
        out.mkdir(parents=True, exist_ok=True)
        for seed in before:
            animate(before[seed], after[seed], out / f"film-{seed}.gif")
    except UserError as error:
        exit_with(error)


if __name__ == "__main__":
    if sys.argv[1:] in ([], ["-h"], ["--help"]):
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
