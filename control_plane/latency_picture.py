"""The picture of two measurements, as an SVG: a dot for each interactive request, without and with the sidecar."""

from html import escape

from control_plane.latency import Latency, Load, Sample, sentence

_WIDTH, _HEIGHT = 760, 320
_TOP, _BOTTOM, _LEFT, _GAP = 64, 44, 52, 40
_PANEL = (_WIDTH - _LEFT - _GAP - 16) / 2

_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.title { font-weight: 600; font-size: 15px }
.axis { stroke: #8c959f; fill: none }
.grid { stroke: #d0d7de; stroke-dasharray: 2 4 }
.straight { fill: #cf222e }
.through { fill: #1a7f37 }
.background { fill: #ffffff }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .grid { stroke: #30363d }
  .straight { fill: #ff7b72 }
  .through { fill: #3fb950 }
  .background { fill: #0d1117 }
}"""


def picture(load: Load, straight: Latency, through: Latency) -> str:
    """Return the SVG. It needs no fonts and no scripts, and follows the reader's theme."""
    top = _above(max(straight.slowest, through.slowest))
    panels = [
        _panel(0, "Straight at vLLM", "straight", straight, load.seconds, top),
        _panel(1, "Through the sidecar", "through", through, load.seconds, top),
    ]
    axis = "how long each interactive request took, by when it was sent, in seconds"
    description = escape(" ".join(sentence(load, straight, through).splitlines()))
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-labelledby="title description">
<title id="title">How long interactive requests take beside a batch</title>
<desc id="description">{description}</desc>
<style>{_STYLE}
</style>
<rect class="background" width="{_WIDTH}" height="{_HEIGHT}"/>
{"".join(panels)}\
<text x="{_WIDTH / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{axis}</text>
</svg>
"""


def _panel(index: int, title: str, kind: str, latency: Latency, seconds: float, top: float) -> str:
    left = _LEFT + index * (_PANEL + _GAP)
    bottom = _HEIGHT - _BOTTOM

    def x(sent: float) -> float:
        return round(left + 8 + (_PANEL - 16) * sent / seconds, 1)

    def y(value: float) -> float:
        return round(bottom - (bottom - _TOP) * value / top, 1)

    def dot(sample: Sample) -> str:
        label = f"sent at {sample.sent:.1f} s, took {sample.seconds:.2f} s"
        place = f'cx="{x(sample.sent)}" cy="{y(sample.seconds)}" r="5"'
        return f'<circle class="{kind}" {place}><title>{label}</title></circle>\n'

    ticks = [top * step / 4 for step in range(5)]
    grid = "".join(f'<path class="grid" d="M{left} {y(tick)}h{_PANEL}"/>\n' for tick in ticks)
    labels = "".join(
        f'<text x="{left - 6}" y="{y(tick) + 4}" text-anchor="end">{tick:g}{" s" if tick == top else ""}</text>\n'
        for tick in ticks
        if index == 0
    )
    return (
        f'<text class="title" x="{left}" y="22">{title}</text>\n'
        f'<text x="{left}" y="42">median {latency.median:.2f} s, {latency.batch_served} batch requests served</text>\n'
        f"{grid}{labels}"
        f'<path class="axis" d="M{left} {_TOP}V{bottom}H{left + _PANEL}"/>\n'
        f"{''.join(map(dot, latency.interactive))}"
        f'<text x="{x(0)}" y="{bottom + 16}" text-anchor="middle">0</text>\n'
        f'<text x="{x(seconds)}" y="{bottom + 16}" text-anchor="middle">{seconds:g}</text>\n'
    )


def _above(value: float) -> float:
    """The end of the axis: the first round number that is not below `value`."""
    return next((float(step) for step in (0.4, 0.8, 1.2, 2, 2.4, 3, 4, 6, 8, 12, 16, 20, 40) if step >= value), value)
