// Honest requests through the demo, without an attack and during the flood of each file of this
// folder that has one. Arguments: words that the names of the files contain; KV_FLOOD_SECONDS sets
// how long each is measured. Attacker, servers and clients share the processors: where p99 is above
// the limit, the same flood goes to a second demo while the clients ask the first one. This control
// shows what the processors alone cause.
import { readdirSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import type { AttackResult } from "./support/attack.js";
import { Demo, demoAbsence } from "./support/demo.js";
import type { Measured } from "./support/honest-prompts.js";
import { ObservedProcess } from "./support/observed-process.js";

const SECONDS = Number(process.env.KV_FLOOD_SECONDS ?? 15);
const MOST_P99_RATIO = 3;
const MOST_GROWTH_MIB = 512;
const FOLDER = fileURLToPath(new URL(".", import.meta.url));

function attackFiles(): string[] {
  const words = process.argv.slice(2);
  return readdirSync(FOLDER)
    .filter((file) => /\.ts$/.test(file) && !/\.test\.ts$|^under-flood/.test(file))
    .filter((file) => words.length === 0 || words.some((word) => file.includes(word)))
    .sort();
}

/** Measures `demo` during a flood of `attacked`; undefined where the file has none. */
async function during(
  demo: Demo,
  file: string,
  attacked = demo,
): Promise<{ seen: Measured; growth: string; mostMib: number } | undefined> {
  const path = `tools/attacks/${file}`;
  const attacker = new ObservedProcess("tools/attacks/support/flood.ts", [
    `${FOLDER}${file}`,
    JSON.stringify(attacked.target),
  ]);
  try {
    if ((await attacker.line()) === "none") return undefined;
    const watches = Object.entries(demo.processes).map(([name, each]) => ({
      name,
      end: each.watchMemory(),
    }));
    await sleep(2000);
    const seen = await demo.measure(SECONDS);
    if (!attacker.isRunning) throw new Error(`the flood of ${path} ended by itself`);
    const grown = watches.map(({ name, end }) => ({ name, mib: end() }));
    attacker.tell("end");
    await sleep(2000);
    const growth = grown.map(({ name, mib }) => `${name} +${mib}`).join(", ");
    return { seen, growth, mostMib: Math.max(...grown.map(({ mib }) => mib)) };
  } finally {
    attacker.kill();
  }
}

/** Measures honest requests during every flood. */
export async function run(): Promise<AttackResult> {
  const attack = "honest requests through the demo during each flood";
  const absence = await demoAbsence();
  if (absence !== undefined)
    return { attack, tries: "none", result: `SKIPPED: ${absence}`, ok: process.env.CI !== "true" };
  const [demo, other] = [await Demo.start(), await Demo.start()];
  try {
    await demo.measure(3);
    const calm = await demo.measure(SECONDS);
    const say = (name: string, { right, wrong, failed, p50Ms, p99Ms }: Measured, rest = "") =>
      process.stderr.write(
        `${name.padEnd(34)} ${right} right, ${wrong} wrong, failed ${JSON.stringify(failed)}, p50 ${p50Ms} ms, p99 ${p99Ms} ms${rest}\n`,
      );
    say("without an attack", calm);
    let floods = 0;
    const refused: string[] = [];
    for (const file of attackFiles()) {
      const result = await during(demo, file);
      if (result === undefined) continue;
      floods += 1;
      const { seen, growth, mostMib } = result;
      const ratio = seen.p99Ms / calm.p99Ms;
      say(file, seen, `, p99 ratio ${ratio.toFixed(2)}, MiB: ${growth}`);
      const isRight = seen.right > 0 && seen.wrong === 0 && Object.keys(seen.failed).length === 0;
      if (!isRight) refused.push(`${file}: not all right`);
      if (!(ratio <= MOST_P99_RATIO)) {
        const control = (await during(demo, file, other))?.seen ?? calm;
        const alone = control.p99Ms / calm.p99Ms;
        say("  control: flood of another demo", control, `, p99 ratio ${alone.toFixed(2)}`);
        refused.push(
          `${file}: p99 ${ratio.toFixed(1)} times, of it ${alone.toFixed(1)} by the processors alone`,
        );
      }
      if (mostMib > MOST_GROWTH_MIB) refused.push(`${file}: +${mostMib} MiB`);
    }
    const after = await demo.measure(SECONDS);
    say("after all", after);
    if (after.wrong + Object.keys(after.failed).length > 0)
      refused.push("not all right afterwards");
    return {
      attack,
      tries: `${floods} floods of ${SECONDS} s`,
      result:
        refused.length === 0
          ? `all right, p99 at most ${MOST_P99_RATIO} times`
          : refused.join("; "),
      ok: floods > 0 && refused.length === 0,
    };
  } finally {
    demo.close();
    other.close();
  }
}
