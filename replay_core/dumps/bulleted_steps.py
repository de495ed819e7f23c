"""Steps that a trainer prints as a head and bullets below it: NeMo-RL.

========================= Step 3/40 =========================
📊 Training Results:
  • Loss: 0.0012
  • Generation KL Error: 0.0013
  • Avg Reward: 0.4200
⏱️  Timing:
  • Total step time: 3.20s
  • policy_training: 1.10s (34.4%)
"""

from __future__ import annotations

from dataclasses import dataclass

from replay_core.regexes import regex

#: One head is enough to look for bullets.
HEAD = r"={5,60} Step \d{1,12}/\d{1,12} ={5,60}"
_HEAD = regex(r"^\s{0,8}={5,60} Step (\d{1,12})/\d{1,12} ={5,60}\s{0,8}$")
_BULLET = regex(
    r"^\s{0,12}[•*-]\s{1,4}([A-Za-z][\w ./()%-]{0,60}?):\s{1,4}"
    r"([-+]?(?:\d[\d,]*(?:\.\d*)?(?:[eE][-+]?\d+)?|nan|inf))\s?(%?)(?:[A-Za-z/]{1,12})?(?:\s\([^)]{0,80}\))?\s{0,8}$"
)
#: The line above some bullets: what they are of.
_ROOM = regex(r"([A-Za-z][A-Za-z ]{2,40}):\s{0,8}$")
#: The bullets below these are the step's own metrics; those below another line are named after it.
_OWN = ("training results",)
#: What the whole step took stands among its phases.
_WHOLE = "Total step time"


@dataclass(slots=True)
class BulletedSteps:
    """The steps of one stream of lines, taken line by line."""

    step: int | None = None
    room: str = ""

    def take(self, line: str) -> tuple[int | None, dict[str, float]]:
        """The step and the metric of a bullet below a step's head; no metric at any other line."""
        if head := _HEAD.match(line):
            self.step, self.room = int(head[1]), ""
            return None, {}
        if self.step is None:
            return None, {}
        if bullet := _BULLET.match(line):
            name, value = bullet[1], float(bullet[2].replace(",", "")) / (100 if bullet[3] else 1)
            return self.step, {name if not self.room or name == _WHOLE else f"{self.room}/{name}": value}
        if room := _ROOM.search(line):
            said = room[1].strip().lower()
            self.room = "" if said in _OWN else said.removesuffix(" results").replace(" ", "_")
        return None, {}
