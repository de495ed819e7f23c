"""Steps that a trainer prints as a head and bullets below it: NeMo-RL; or names set to the right: rsl_rl.

========================= Step 3/40 =========================
📊 Training Results:
  • Loss: 0.0012
  • Generation KL Error: 0.0013
  • Avg Reward: 0.4200
⏱️  Timing:
  • Total step time: 3.20s
  • policy_training: 1.10s (34.4%)

                Learning iteration 3/40
          Mean value_function loss: 0.0120
                       Mean reward: 16.13
"""

from __future__ import annotations

from msgspec import Struct

from replay_core.regexes import regex

#: One head is enough to look for bullets.
HEAD = r"={5,60} Step \d{1,12}/\d{1,12} ={5,60}|Learning iteration \d{1,12}/\d{1,12}"
_HEAD = regex(r"^\s{0,8}={5,60} Step (\d{1,12})/\d{1,12} ={5,60}\s{0,8}$")
_BULLET = regex(
    r"^\s{0,12}[•*-]\s{1,4}([A-Za-z][\w ./()%-]{0,60}?):\s{1,4}"
    r"([-+]?(?:\d[\d,]*(?:\.\d*)?(?:[eE][-+]?\d+)?|nan|inf))\s?(%?)(?:[A-Za-z/]{1,12})?(?:\s\([^)]{0,80}\))?\s{0,8}$"
)
_ITERATION = regex(r"^\s{4,80}Learning iteration (\d{1,12})/\d{1,12}\s{0,40}$")
_SET_RIGHT = regex(
    r"^\s{2,60}([A-Za-z][\w ./()%-]{0,60}?):\s{1,4}"
    r"([-+]?(?:\d[\d,]*(?:\.\d*)?(?:[eE][-+]?\d+)?|nan|inf))\s?(?:s\b.*|steps/s.*)?$"
)
#: Dynamic sampling's batches of a step so far, none of which is the last.
_DRAWN = regex(r"\bProcessed (\d{1,6}) batches so far\b")
#: The line above some bullets: what they are of.
_ROOM = regex(r"([A-Za-z][A-Za-z ]{2,40}):\s{0,8}$")
#: The bullets below these are the step's own metrics; those below another line are named after it.
_OWN = ("training results",)
#: What the whole step took stands among its phases.
_WHOLE = "Total step time"


class BulletedSteps(Struct):
    """The steps of one stream of lines, taken line by line."""

    step: int | None = None
    room: str = ""
    is_set_right: bool = False

    def take(self, line: str) -> tuple[int | None, dict[str, float]]:
        """The step and the metric of a bullet below a step's head; no metric at any other line."""
        if head := _HEAD.match(line) or _ITERATION.match(line):
            self.step, self.room = int(head[1]), ""
            self.is_set_right = "Learning iteration" in line
            return None, {}
        if self.step is None:
            return None, {}
        if self.is_set_right and (named := _SET_RIGHT.match(line)):
            return self.step, {named[1]: float(named[2].replace(",", ""))}
        if "batches so far" in line and (drawn := _DRAWN.search(line)):
            return self.step, {"num_gen_batches": float(drawn[1]) + 1}
        if bullet := _BULLET.match(line):
            name, value = bullet[1], float(bullet[2].replace(",", "")) / (100 if bullet[3] else 1)
            return self.step, {name if not self.room or name == _WHOLE else f"{self.room}/{name}": value}
        if room := _ROOM.search(line):
            said = room[1].strip().lower()
            self.room = "" if said in _OWN else said.removesuffix(" results").replace(" ", "_")
        return None, {}
