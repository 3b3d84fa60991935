// Arguments: the attack, and a `Target` as JSON. A line "round" on stdin has it attack once, and
// answer with the attack's checks; "flood" has it attack until it is killed.
import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";
import type { Target } from "./attack.js";
import { ATTACKS } from "./attacks.js";
import { leave } from "./strangers.js";

const [name = "", given = "{}"] = process.argv.slice(2);
const target = JSON.parse(given) as Target;
const attack = ATTACKS[name];
if (attack === undefined) throw new Error(`no attack ${name}`);

for await (const line of createInterface({ input: process.stdin })) {
  if (line === "flood") console.log("begins");
  do {
    const round = attack.round(target);
    if (line === "flood") await round.catch(() => {});
    else console.log(JSON.stringify((await round) ?? []));
    leave();
    await sleep(50);
  } while (line === "flood");
}
process.exit();
