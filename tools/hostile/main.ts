// See README.md. --only KIND,KIND runs some kinds; a wrong one lists them all.
import { mkdtempSync, rmSync } from "node:fs";
import { availableParallelism, tmpdir } from "node:os";
import { join } from "node:path";
import { parseArgs } from "node:util";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { vitest } from "../setup/setup.mjs";
import { type Row, skipped } from "./row.js";
import { type Part, runPart } from "./run-part.js";

const text = (initial = "") => ({ type: "string", default: initial }) as const;
const flag = { type: "boolean", default: false } as const;

const { values } = parseArgs({
  options: {
    only: text(),
    seed: text(`${Date.now()}`),
    // Of faults; of properties and proofs.
    requests: text("200000"),
    factor: text("50"),
    // Words of names of attacks, and of floods of `under-flood`; beginnings of cells.
    attacks: text(),
    floods: text(),
    cells: text(),
    // Of fuzz. `keep`: the corpus gets inputs that reach new code.
    target: text(),
    keep: flag,
    minutes: { type: "string" },
    // Of soak, as is `minutes`. `every-s`: between two changes of the instances.
    clients: text("16"),
    "every-s": text("20"),
    engines: text(),
    connector: text("NixlConnector"),
    readback: flag,
  },
});

export interface PartOptions extends Omit<typeof values, "minutes"> {
  readonly minutes: number;
  /** Of inputs that reach new code, for the next minutes of fuzzing. */
  readonly found: string;
}

function stop(message: string): never {
  console.error(message);
  process.exit(2);
}

function numberOf(name: "requests" | "minutes", initial = 0): number {
  const number = Number(values[name] ?? initial);
  if (number > 0) return number;
  stop(`--${name} must be a number above 0, not ${JSON.stringify(values[name])}`);
}

const wordsOf = (list: string) => list.split(",").filter(Boolean);

/** All of them must be known. */
function namesIn(option: "only" | "target", known: readonly string[], all = known) {
  const words = wordsOf(values[option]);
  const other = words.find((word) => !known.includes(word));
  if (other === undefined) return words.length === 0 ? all : words;
  stop(`--${option} must be of ${known.join(", ")}, not ${JSON.stringify(other)}`);
}

const found = mkdtempSync(join(tmpdir(), "kv-hostile-"));
process.on("exit", () => rmSync(found, { recursive: true, force: true }));

const suites = (name: string, files: readonly string[], env: NodeJS.ProcessEnv = {}) => [
  { name, command: vitest, args: ["run", ...files], env },
];

function part(
  [kind, name]: readonly [kind: string, name: string],
  limitMinutes?: number,
  given: Partial<PartOptions> = {},
  node: readonly string[] = [],
): Part {
  const options = JSON.stringify({ ...values, found, ...given });
  return {
    name: `${kind} ${name}`,
    command: process.execPath,
    args: [...node, "--import", "tsx", "tools/hostile/part.ts", kind, name, options],
    limitMs: limitMinutes && limitMinutes * 60_000,
  };
}

const REQUESTS_PER_SEED = 10_000;
const CONNECTORS = ["pull", "push"];
const PROPERTIES = ["--config", "tools/hostile/properties/vitest.config.ts"];
const KV_SEED = values.seed;
const KV_PROPERTY_FACTOR = values.factor;

const KINDS: Readonly<Record<string, () => readonly Part[] | Promise<readonly Part[]>>> = {
  whole: () => suites("all suites in their long form", [], { KV_LONG: "1" }),

  faults() {
    const seeds = Array.from({ length: Math.ceil(numberOf("requests") / REQUESTS_PER_SEED) });
    return seeds.flatMap((_, at) => {
      const KV_REQUESTS = Math.min(
        REQUESTS_PER_SEED,
        numberOf("requests") - at * REQUESTS_PER_SEED,
      );
      const env = { KV_SEED: `${KV_SEED}-${at}`, KV_REQUESTS: `${KV_REQUESTS}` };
      return CONNECTORS.flatMap((connector) =>
        suites(
          `${connector}: ${KV_REQUESTS} requests under faults, seed ${env.KV_SEED}`,
          [`packages/${connector}/test/faults.test.ts`],
          env,
        ),
      );
    });
  },

  addon: () =>
    suites("requests under faults over the addon", ["tools/hostile/faults"], {
      KV_ADDON_REQUESTS: "5000",
      KV_SEED,
    }),

  properties: () =>
    suites(`properties with ${values.factor} times their runs`, PROPERTIES, { KV_PROPERTY_FACTOR }),

  engine: () =>
    CONNECTORS.flatMap((connector) =>
      suites(
        `${connector}: 10,000 random scenes of two engines`,
        [`packages/${connector}/test/engine.test.ts`],
        { KV_SCENES: "10000" },
      ),
    ),

  "isolation-property": () =>
    CONNECTORS.flatMap((connector) =>
      suites(
        `${connector}: scenes of users and attackers`,
        [...PROPERTIES, `packages/${connector}/test/isolation-property.test.ts`],
        { KV_PROPERTY_FACTOR },
      ),
    ),

  mutations: () =>
    suites(
      "a million mutated blobs, and as many notifications",
      [
        "packages/nixl/test/metadata/metadata-mutations.test.ts",
        "packages/nixl/test/metadata/metadata-check.long.test.ts",
        "packages/protocol/src/notifications/damaged-notifications.test.ts",
      ],
      { KV_MUTATIONS: "1000000", KV_CHECKED_MUTATIONS: "10000" },
    ),

  "stream-cuts": () =>
    suites("answers cut at every byte", ["packages/proxy/test/cuts"], {
      KV_STREAM_CUTS: "all",
      KV_SEED,
    }),

  growth: () => [
    {
      name: "how costs grow, small sizes",
      command: process.execPath,
      args: ["tools/bench/bench.mjs", "growth", "--short"],
    },
  ],

  restarts: () =>
    suites(
      "restarts at one address",
      ["-t", "SIGKILL", "tools/hostile/faults", "restarts.test.ts"],
      { KV_RESTARTS: "1000", KV_NIXL_RESTARTS: "100", KV_SEED },
    ),

  exits: () => suites("exits of processes", ["tools/hostile/exits"], { KV_EXITS: "200", KV_SEED }),

  deaths: () => [part(["deaths", "of peers"])],

  descriptors: () => suites("0 to 32 descriptors left", ["few-descriptors"], { KV_LONG: "1" }),

  bundlers: () => suites("bundles of @kv/nixl, alone in a folder", ["tools/pack/bundlers"]),

  async attacks() {
    const { attacksNamed } = await import("./attacks/attacks.js");
    const names = attacksNamed(wordsOf(values.attacks));
    if (names.length === 0) stop(`no attack has one of ${values.attacks} in its name`);
    return names.map((name) => part(["attack", name], name === "under-flood" ? 30 : 5));
  },

  prove: () =>
    suites(
      `proofs with ${values.factor} times their cases`,
      [...PROPERTIES, "packages/plan", "packages/kv-plan/src/data", "packages/topology"],
      { KV_PROPERTY_FACTOR },
    ),

  /** V8's counts take more memory the longer they run: each minute is a process. */
  async fuzz() {
    const { TARGETS } = await import("./fuzz/targets/index.js");
    const all = numberOf("minutes", 1);
    return namesIn("target", Object.keys(TARGETS)).flatMap((name) =>
      Array.from({ length: Math.ceil(all) }, (_, at) => {
        const given = { minutes: Math.min(1, all - at), seed: `${KV_SEED}-${at}` };
        // A reader that has not returned by then hangs.
        return part(["fuzz", name], given.minutes + 2, given, ["--max-old-space-size=512"]);
      }),
    );
  },

  soak() {
    const minutes = numberOf("minutes", 30);
    const name = values.readback ? "readback" : values.engines || "proxy";
    return [part(["soak", name], minutes + 10, { minutes })];
  },
};

/** Not run again after it. */
const CONTAINED: Readonly<Record<string, readonly string[]>> = {
  properties: ["isolation-property"],
  whole: ["descriptors", "bundlers"],
};
const ONLY_NAMED = ["prove", "fuzz", "soak"];
const NEED_NIXL = ["exits", "deaths"];

const kinds = Object.keys(KINDS);
const only = namesIn(
  "only",
  kinds,
  kinds.filter((kind) => !ONLY_NAMED.includes(kind)),
);
const contained = only.flatMap((kind) => CONTAINED[kind] ?? []);
const rows: Row[] = [];
console.log(`seed ${values.seed}`);
for (const [kind, partsOf] of Object.entries(KINDS)) {
  if (!only.includes(kind) || contained.includes(kind)) continue;
  if (nixlMissing !== undefined && NEED_NIXL.includes(kind)) {
    rows.push(skipped(kind, nixlMissing));
    continue;
  }
  const left = [...(await partsOf())];
  const runNext = async () => {
    for (let next = left.shift(); next !== undefined; next = left.shift())
      rows.push(await runPart(next));
  };
  // Fault runs are in virtual time: others do not disturb them.
  const jobs = kind === "faults" ? Math.min(availableParallelism(), 4) : 1;
  await Promise.all(Array.from({ length: jobs }, runNext));
}

console.log("\n| part | tries | result |\n| --- | --- | --- |");
for (const { name, tries, result, ok } of rows)
  console.log(`| ${name} | ${tries} | ${ok ? "" : "**FAIL** "}${result} |`);
const passed = rows.filter(({ ok }) => ok).length;
console.log(`\n${passed} passed, ${rows.length - passed} failed`);
process.exit(passed === rows.length && passed > 0 ? 0 : 1);
