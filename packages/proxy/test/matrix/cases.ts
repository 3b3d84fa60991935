/** What can be chosen for a case, by axis. */
export const AXES = {
  /** What an instance does in place of its part. */
  fault: [
    "none",
    "200 error",
    "204",
    "307",
    "401",
    "403",
    "404",
    "408",
    "413",
    "429",
    "499",
    "500",
    "501",
    "502",
    "503",
    "504",
    "HTML",
    "half",
    "reset",
    "reset after the head",
    "silence",
  ],
  leg: ["P", "D", "both"],
  strategy: [
    "pull",
    "push",
    "push, prefill first",
    "auto",
    "readback",
    "conditional",
    "single",
    "other route",
  ],
  stream: [false, true],
  n: [1, 2],
  client: ["stays", "leaves at P", "leaves at D", "leaves in the answer", "does not read"],
  /** Instances of each role that do their part, besides the one with the fault. */
  others: [0, 1],
  frontEnd: ["proxy", "sidecar"],
} as const;

type Axes = typeof AXES;
/** One choice for each axis. */
export type Case = { readonly [Axis in keyof Axes]: Axes[Axis][number] };

const NAMES = Object.keys(AXES) as (keyof Axes)[];
const pairsOf = (one: Case) =>
  NAMES.flatMap((name, at) =>
    NAMES.slice(at + 1).map((other) => `${name} ${one[name]}, ${other} ${one[other]}`),
  );

/** Numbers from 0 to `below`, the same ones each time. */
function sequence(): (below: number) => number {
  let state = 1;
  return (below) => {
    state = (Math.imul(state, 1_664_525) + 1_013_904_223) >>> 0;
    return Math.floor((state / 2 ** 32) * below);
  };
}

/** Cases in which each two choices of two axes meet. */
export function pairwise(): Case[] {
  const next = sequence();
  const left = new Set(
    NAMES.flatMap((name, at) =>
      NAMES.slice(at + 1).flatMap((other) =>
        AXES[name].flatMap((one) => AXES[other].map((two) => `${name} ${one}, ${other} ${two}`)),
      ),
    ),
  );
  const random = () =>
    Object.fromEntries(NAMES.map((name) => [name, AXES[name][next(AXES[name].length)]])) as Case;
  const cases: Case[] = [];
  while (left.size > 0) {
    const gain = (one: Case) => pairsOf(one).filter((pair) => left.has(pair)).length;
    const best = Array.from({ length: 40 }, random)
      .map((one) => ({ one, gained: gain(one) }))
      .reduce((most, other) => (other.gained > most.gained ? other : most));
    if (best.gained === 0) continue;
    cases.push(best.one);
    for (const pair of pairsOf(best.one)) left.delete(pair);
  }
  return cases;
}

/** All cases; whether there are others, and the front end, take turns. */
export function all(): Case[] {
  const { others, frontEnd, ...product } = AXES;
  let cases: Record<string, unknown>[] = [{}];
  for (const [name, choices] of Object.entries(product))
    cases = cases.flatMap((one) => choices.map((choice) => ({ ...one, [name]: choice })));
  return cases.map(
    (one, at) => ({ ...one, others: others[at % 2], frontEnd: frontEnd[(at >> 1) % 2] }) as Case,
  );
}

/** Whether a request has a prefill leg. At a sidecar the request decides, not a rule. */
const usesP = ({ strategy, frontEnd }: Case) =>
  frontEnd === "sidecar" && strategy === "conditional"
    ? true
    : !["conditional", "single", "other route"].includes(strategy);

/** The legs of a case whose instance has the fault. */
export function faultyLegs(one: Case): readonly ("P" | "D")[] {
  if (one.fault === "none") return [];
  const legs = one.leg === "both" ? (["P", "D"] as const) : [one.leg];
  return legs.filter((leg) => leg === "D" || usesP(one));
}

/** How many instances of a role do their part besides the first one: a sidecar has one D. */
export function othersOf({ others, frontEnd }: Case, leg: "P" | "D"): number {
  return frontEnd === "sidecar" && leg === "D" ? 0 : others;
}

/** What a client that stays may get: a status, and `broken` behind a stream that ends early. */
export function truthful(one: Case): ReadonlySet<string> {
  const results = faultyLegs(one).flatMap((leg) => resultsOf(one, leg));
  return new Set(results.length === 0 ? ["200"] : results);
}

function resultsOf(one: Case, leg: "P" | "D"): string[] {
  const { fault, stream, strategy } = one;
  const others = othersOf(one, leg);
  const streams = stream && leg === "D" && strategy !== "other route";
  // Another instance may have been chosen first.
  const orOther = (result: string) => (others > 0 ? ["200", result] : [result]);
  if (fault === "silence") return orOther("504");
  if (fault === "half" && streams) return orOther("200 broken");
  if (fault === "200 error" && strategy === "other route") return ["200"];
  if (["408", "413", "499", "501"].includes(fault)) return orOther(fault);
  // P has answered, though without KV.
  if (fault === "200 error" && leg === "P") return orOther("502");
  if (others > 0) return ["200"];
  if (fault === "200 error" && streams) return ["500"];
  return [/^[45]/.test(fault) ? fault : "502"];
}
