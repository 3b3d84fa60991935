import { setTimeout as sleep } from "node:timers/promises";
import { descriptors, ObservedProcess } from "../observed-process.js";
import { type Check, type Row, rowOf, skipped } from "../row.js";
import type { Attack } from "./attack.js";
import { forgedParams, strangerWithoutKey } from "./isolation.js";
import { PROGRAM_ATTACKS } from "./programs.js";
import { PROXY_ATTACKS } from "./proxy.js";
import { SIDE_CHANNEL_ATTACKS } from "./side-channel.js";
import { demoAbsence, measure, VICTIMS, type Victim } from "./victims.js";

export const ATTACKS: Readonly<Record<string, Attack>> = {
  ...PROGRAM_ATTACKS,
  ...PROXY_ATTACKS,
  ...SIDE_CHANNEL_ATTACKS,
};

/** Those that bring their own servers and users. The floods are the last one: they take longest. */
const SCENARIOS: Readonly<Record<string, (floods: readonly string[]) => Promise<Row>>> = {
  "isolation-forged-params": forgedParams,
  "isolation-stranger": strangerWithoutKey,
  "under-flood": underFlood,
};

export const ATTACK_NAMES = [...Object.keys(ATTACKS), ...Object.keys(SCENARIOS)];

/** Until what an attack has left is gone. */
const SETTLE_MS = 2000;

const contains = (name: string, words: readonly string[]) =>
  words.length === 0 || words.some((word) => name.includes(word));

/** Those whose names contain one of the words; all for none. */
export const attacksNamed = (words: readonly string[]): string[] =>
  ATTACK_NAMES.filter((name) => contains(name, words));

/** Runs an attack at full size. `floods`: words of the floods of `under-flood`. */
export function runAttack(name: string, floods: readonly string[]): Promise<Row> {
  const attack = ATTACKS[name];
  if (attack !== undefined) return runRounds(name, attack);
  const scenario = SCENARIOS[name];
  if (scenario === undefined) throw new Error(`no attack ${name}`);
  return scenario(floods);
}

const attackerOf = (name: string, { target }: Victim) =>
  new ObservedProcess("tools/hostile/attacks/attacker.ts", [name, JSON.stringify(target)]);

/** What holds for every victim while `work` is done: others are served, and nothing grows. */
async function observe(victim: Victim, work: () => Promise<unknown>) {
  const watches = Object.entries(victim.processes).map(([name, each]) => ({
    name,
    each,
    end: each.watch(),
  }));
  const { right, failed, p99Ms, longestMs } = await measure(victim.honest, work);

  const problems = Object.entries(failed).map(([reason, count]) => `${count} ${reason}`);
  const seen = watches.map(({ name, each, end }) => ({ name, each, ...end() }));
  const checks: Check[] = [
    [`honest: ${right} right`, right > 0],
    [`${problems.length === 0 ? "0" : problems.join(", ")} failed`, problems.length === 0],
    [`longest ${longestMs} ms`, longestMs <= victim.mostWaitMs],
    ...seen.flatMap(({ name, each, grownMib }): Check[] => [
      [`${name} +${grownMib} MiB`, grownMib <= victim.mostMib],
      ...(each.isRunning ? [] : [[`${name} has ended`, false] as const]),
    ]),
  ];
  return { checks, p99Ms, mostDescriptors: Math.max(...seen.map((each) => each.mostDescriptors)) };
}

async function runRounds(name: string, attack: Attack): Promise<Row> {
  const { title, tries, rounds = 1, attackers: count = 1, mostDescriptors = Infinity } = attack;
  const absence = attack.victim === "demo" ? await demoAbsence() : undefined;
  if (absence !== undefined) return skipped(title, absence);
  const victim = await VICTIMS[attack.victim]();
  const processes = Object.values(victim.processes);
  const openDescriptors = () => processes.reduce((sum, { pid }) => sum + descriptors(pid), 0);
  const attackers = Array.from({ length: count }, () => attackerOf(name, victim));
  try {
    const before = openDescriptors();
    const own: Check[] = [];
    const during = await observe(victim, async () => {
      for (let round = 0; round < rounds; round += 1)
        for (const checks of await Promise.all(attackers.map((each) => each.ask("round"))))
          own.push(...(JSON.parse(checks) as Check[]));
    });
    await Promise.all(attackers.map((each) => each.end()));
    const after = await observe(victim, () => sleep(SETTLE_MS));

    const left = openDescriptors() - before;
    return rowOf(title, rounds === 1 ? tries : `${rounds} times ${tries}`, [
      ...own,
      ...during.checks,
      [`${during.mostDescriptors} descriptors`, during.mostDescriptors <= mostDescriptors],
      [`${left} of them left`, left < 50],
      ...after.checks.slice(0, 2),
    ]);
  } finally {
    victim.close();
  }
}

const SECONDS = Number(process.env.KV_FLOOD_SECONDS ?? 15);
const MOST_P99_RATIO = 3;

/**
 * Honest requests through the demo, without an attack and during each attack that a demo can have.
 * Attacker, servers and clients share the processors: where p99 is above the limit, the same attack
 * goes to a second demo while the clients ask the first one. This control shows what the processors
 * alone cause.
 */
async function underFlood(floods: readonly string[]): Promise<Row> {
  const title = "honest requests through the demo during each flood";
  const absence = await demoAbsence();
  if (absence !== undefined) return skipped(title, absence);
  const [demo, other] = [await VICTIMS.demo(), await VICTIMS.demo()];
  const seconds = () => sleep(SECONDS * 1000);

  async function during(name: string, attacked: Victim) {
    const attacker = attackerOf(name, attacked);
    try {
      await attacker.ask("flood");
      await sleep(SETTLE_MS);
      const seen = await observe(demo, seconds);
      if (!attacker.isRunning) throw new Error(`the flood of ${name} ended by itself`);
      return seen;
    } finally {
      await attacker.end();
      await sleep(SETTLE_MS);
    }
  }

  try {
    await observe(demo, () => sleep(3000));
    const calm = await observe(demo, seconds);
    const checks: Check[] = [[`without: p99 ${calm.p99Ms} ms`, true], ...calm.checks];
    const names = Object.keys(ATTACKS).filter(
      (name) => contains(name, floods) && ATTACKS[name]?.floods !== false,
    );
    for (const name of names) {
      const seen = await during(name, demo);
      const ratio = seen.p99Ms / calm.p99Ms;
      const isBounded = ratio <= MOST_P99_RATIO;
      const alone = isBounded ? undefined : await during(name, other);
      const control = alone && `, with another demo attacked ${alone.p99Ms} ms`;
      checks.push([`${name}: p99 ${seen.p99Ms} ms${control ?? ""}`, isBounded], ...seen.checks);
    }
    checks.push(...(await observe(demo, seconds)).checks);
    return rowOf(title, `${names.length} floods of ${SECONDS} s`, checks);
  } finally {
    demo.close();
    other.close();
  }
}
