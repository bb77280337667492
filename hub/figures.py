"""Line charts as SVG text. The same numbers give the same bytes, so that pushing them again changes nothing.

Knows points and axes, not what they stand for.
"""

import math
from xml.sax.saxutils import escape

Points = list[tuple[float, float]]

_WIDTH, _HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 20, 40, 52
_STYLES = (("#1f5fa8", ""), ("#b3541e", "6 4"), ("#2e7d4f", "2 3"), ("#6a4c93", "10 4 2 4"))  # not colour alone


def line_chart(title: str, x_label: str, y_label: str, series: dict[str, Points]) -> str:
    """One SVG document.

    Raises:
        ValueError: there is nothing finite to draw.
    """
    drawn = {
        name: [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)] for name, points in series.items()
    }
    everything = [point for points in drawn.values() for point in points]
    if not everything:
        raise ValueError(f"{title}: there is nothing to draw")
    x_low, x_high = _range([x for x, _ in everything])
    y_low, y_high = _range([y for _, y in everything])

    def at(x: float, y: float) -> str:
        across = _LEFT + (x - x_low) / (x_high - x_low) * (_WIDTH - _LEFT - _RIGHT)
        down = _HEIGHT - _BOTTOM - (y - y_low) / (y_high - y_low) * (_HEIGHT - _TOP - _BOTTOM)
        return f"{across:.1f},{down:.1f}"

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        'font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="14">{escape(title)}</text>',
        f'<text x="{_WIDTH // 2}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text transform="translate(14 {_HEIGHT // 2}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>',
    ]
    for tick in range(5):
        x, y = x_low + (x_high - x_low) * tick / 4, y_low + (y_high - y_low) * tick / 4
        across, down = at(x, y_low).split(",")[0], at(x_low, y).split(",")[1]
        lines += [
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{down}" y2="{down}" stroke="#ddd"/>',
            f'<text x="{_LEFT - 6}" y="{float(down) + 4:.1f}" text-anchor="end">{y:.3g}</text>',
            f'<text x="{across}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{x:.4g}</text>',
        ]
    for index, (name, points) in enumerate(drawn.items()):
        colour, dashes = _STYLES[index % len(_STYLES)]
        path = " ".join(at(x, y) for x, y in points)
        dash = f' stroke-dasharray="{dashes}"' if dashes else ""
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        y = _TOP + 4 + 18 * index
        lines += [
            f'<line x1="{_WIDTH - 190}" x2="{_WIDTH - 160}" y1="{y}" y2="{y}" stroke="{colour}" '
            f'stroke-width="2"{dash}/>',
            f'<text x="{_WIDTH - 154}" y="{y + 4}">{escape(name)}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _range(values: list[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)
