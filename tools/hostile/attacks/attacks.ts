import { setTimeout as sleep } from "node:timers/promises";
import { descriptors, ObservedProcess } from "../observed-process.js";
import { type Check, type Row, rowOf, skipped } from "../row.js";
import type { Attack } from "./attack.js";
import { PROGRAM_ATTACKS } from "./programs.js";
import { PROXY_ATTACKS } from "./proxy.js";
import { SIDE_CHANNEL_ATTACKS } from "./side-channel.js";
import { demoAbsence, measure, VICTIMS, type Victim } from "./victims.js";

export const ATTACKS: Readonly<Record<string, Attack>> = {
  ...PROGRAM_ATTACKS,
  ...PROXY_ATTACKS,
  ...SIDE_CHANNEL_ATTACKS,
};

/** The floods, one after another, beside honest requests: it takes longest. */
const UNDER_FLOOD = "under-flood";

const SETTLE_MS = 2000;

/** All for no words. */
export const attacksNamed = (words: readonly string[]): string[] =>
  [...Object.keys(ATTACKS), UNDER_FLOOD].filter(
    (name) => words.length === 0 || words.some((word) => name.includes(word)),
  );

/** `floods`: words of the floods of `under-flood`. */
export async function runAttack(name: string, floods: readonly string[]): Promise<Row> {
  const attack = ATTACKS[name];
  const needsDemo = attack === undefined || attack.victim === "demo";
  const absence = needsDemo ? await demoAbsence() : undefined;
  if (absence !== undefined) return skipped(name, absence);
  return attack === undefined ? underFlood(floods) : runRounds(name, attack);
}

function startAttackers(name: string, { target }: Victim): ObservedProcess[] {
  const args = [name, JSON.stringify(target)];
  return Array.from(
    { length: ATTACKS[name]?.attackers ?? 1 },
    () => new ObservedProcess("tools/hostile/attacks/attacker.ts", args),
  );
}

const endAll = (processes: readonly ObservedProcess[]) =>
  Promise.all(processes.map((each) => each.end()));

/** What holds for every victim while `work` is done. */
async function observe(victim: Victim, work: () => Promise<unknown>) {
  const watches = Object.entries(victim.processes).map(
    ([name, each]) => [name, each.watch()] as const,
  );
  const { right, failed, p99Ms, longestMs } = await measure(victim.honest, work);

  const sizes = watches.map(([name, end]) => ({ name, ...end() }));
  const problems = Object.entries(failed).map(([reason, count]) => `${count} times ${reason}`);
  const served: Check[] = [
    [`honest: ${right} right`, right > 0],
    [`failed: ${problems.join(", ") || "none"}`, problems.length === 0],
  ];
  const checks: Check[] = [
    ...served,
    [`longest ${longestMs} ms`, longestMs <= victim.mostWaitMs],
    ...sizes.map(
      ({ name, grownMib }) => [`${name} +${grownMib} MiB`, grownMib <= victim.mostMib] as const,
    ),
  ];
  return { served, checks, p99Ms, mostOpen: Math.max(...sizes.map((each) => each.mostOpen)) };
}

async function runRounds(name: string, attack: Attack): Promise<Row> {
  const { title, tries, rounds = 1, mostDescriptors = Number.POSITIVE_INFINITY } = attack;
  const victim = await VICTIMS[attack.victim ?? "proxy"]();
  const processes = Object.values(victim.processes);
  const attackers = startAttackers(name, victim);
  const open = () => processes.reduce((sum, { pid }) => sum + descriptors(pid), 0);
  const before = open();
  const own: Check[] = [];
  const during = await observe(victim, async () => {
    for (let round = 0; round < rounds; round += 1)
      for (const checks of await Promise.all(attackers.map((each) => each.ask("round"))))
        own.push(...(JSON.parse(checks) as Check[]));
  });
  await endAll(attackers);
  const after = await observe(victim, () => sleep(SETTLE_MS));

  const left = open() - before;
  const ended = processes.filter(({ isRunning }) => !isRunning).length;
  return rowOf(title, rounds === 1 ? tries : `${rounds} times ${tries}`, [
    ...own,
    ...during.checks,
    [`${during.mostOpen} descriptors`, during.mostOpen <= mostDescriptors],
    [`${left} left`, left < 50],
    ...after.served,
    [`${ended} processes ended`, ended === 0],
  ]);
}

const SECONDS = Number(process.env.KV_FLOOD_SECONDS ?? 15);
const MOST_P99_RATIO = 3;

/**
 * Attacker, servers and clients share the processors: where p99 is above the limit, the same attack
 * goes to a second demo, as a control.
 */
async function underFlood(floods: readonly string[]): Promise<Row> {
  const [demo, other] = [await VICTIMS.demo(), await VICTIMS.demo()];
  const seconds = () => sleep(SECONDS * 1000);

  async function during(name: string, attacked: Victim) {
    const attackers = startAttackers(name, attacked);
    await Promise.all(attackers.map((each) => each.ask("flood")));
    await sleep(SETTLE_MS);
    const seen = await observe(demo, seconds);
    if (attackers.some(({ isRunning }) => !isRunning)) throw new Error(`${name} ended by itself`);
    await endAll(attackers);
    await sleep(SETTLE_MS);
    return seen;
  }

  await observe(demo, () => sleep(3000));
  const calm = await observe(demo, seconds);
  const checks: Check[] = [[`without: p99 ${calm.p99Ms} ms`, true], ...calm.checks];
  const names = attacksNamed(floods).filter(
    (name) => name in ATTACKS && ATTACKS[name]?.floods !== false,
  );
  for (const name of names) {
    const seen = await during(name, demo);
    const isBounded = seen.p99Ms <= MOST_P99_RATIO * calm.p99Ms;
    const control = isBounded
      ? ""
      : `; attacking another demo ${(await during(name, other)).p99Ms}`;
    checks.push([`${name}: p99 ${seen.p99Ms} ms${control}`, isBounded], ...seen.checks);
  }
  checks.push(...(await observe(demo, seconds)).checks);
  return rowOf(
    "honest requests through the demo during each flood",
    `${names.length} floods of ${SECONDS} s`,
    checks,
  );
}
