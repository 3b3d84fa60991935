// Arguments: kind, name, and options as JSON. The last line is the row.
import type { PartOptions } from "./main.js";
import { type Row, rowOf } from "./row.js";

const wordsOf = (list: string) => list.split(",").filter(Boolean);

/** Each kind loads what it needs. */
const RUNS: Readonly<Record<string, (name: string, options: PartOptions) => Promise<Row>>> = {
  async attack(name, { floods }) {
    const { runAttack } = await import("./attacks/attacks.js");
    return runAttack(name, wordsOf(floods));
  },
  async fuzz(name, options) {
    const { runFuzz } = await import("./fuzz/fuzz.js");
    return runFuzz(name, options);
  },
  async deaths(_, { cells }) {
    const { runDeaths } = await import("./exits/deaths.js");
    return runDeaths(wordsOf(cells));
  },
  async soak(name, options) {
    const { proxySoak } = await import("./soaks/proxy.js");
    const { readbackSoak } = await import("./soaks/readback.js");
    const { engineSoak } = await import("./soaks/engines.js");
    const soaks: Readonly<Record<string, () => ReturnType<typeof proxySoak>>> = {
      proxy: () => proxySoak(options),
      readback: () => readbackSoak(options),
      memory: () => engineSoak("memory", options),
      nixl: () => engineSoak("nixl", options),
    };
    const tries = `${options.minutes} minutes, ${options.clients} clients`;
    return rowOf(`soak: ${name}`, tries, (await soaks[name]?.()) ?? []);
  },
};

const [kind = "", name = "", options = "{}"] = process.argv.slice(2);
const row = await RUNS[kind]?.(name, JSON.parse(options) as PartOptions);
// A connection or a timer that is left must not keep the process.
process.stdout.write(`\n${JSON.stringify(row)}\n`, () => process.exit(row?.ok === true ? 0 : 1));
