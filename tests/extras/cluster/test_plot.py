"""The plot of a law shows its values at the right places."""

from xml.etree import ElementTree

from lockstep_gpt.extras.cluster.law import Law
from lockstep_gpt.extras.cluster.plot import as_svg

SPACE = "{http://www.w3.org/2000/svg}"
LAW = Law(0.5, 8.0, 0.2)


def run(weights):
    return {"size": f"{weights:,}", "weights": weights, "val_loss": LAW.loss(weights)}


def test_runs_that_follow_a_law_are_on_its_line():
    picture = ElementTree.fromstring(as_svg(LAW, [*map(run, (10**5, 10**6))], [run(2 * 10**6)]))
    circles = picture.findall(f"{SPACE}circle")
    assert [circle.get("fill") for circle in circles] == ["#c30", "#c30", "#fff"]
    places = [tuple(float(circle.get(name)) for name in ("cx", "cy")) for circle in circles]
    solid, dashed = (line.get("points").split() for line in picture.findall(f"{SPACE}polyline"))
    ends = [tuple(map(float, end.split(","))) for end in (solid[-1], dashed[0])]
    assert ends == [places[1]] * 2  # the line is solid up to the largest run
    assert places[0][0] < places[1][0] < places[2][0]
    assert places[0][1] < places[1][1] < places[2][1]  # down the page
    assert {"100,000, 1.300", "100k", "1M"} <= {text.text for text in picture.iter(f"{SPACE}text")}
