import { readdirSync } from "node:fs";
import type { ConnectorModule, KvTransferParams } from "@kv/interface";
import type { FaultRule } from "@kv/transport-memory";
import { expect, it } from "vitest";
import { createScenario, prompt } from "../scenarios/scenario.js";
import type { SimEngine } from "../simulator/sim-engine.js";
import type { SimRequest } from "../simulator/sim-options.js";
import { Trace } from "./trace.js";

/** The work, whose outcome nobody may look at. */
export function started<T>(work: Promise<T>): Promise<T> {
  work.catch(() => {});
  return work;
}

export type TracePlay = ReturnType<typeof createScenario> & {
  /** Resolves to the parameters for D. */
  prefilled(p: SimEngine, n: number, change?: Partial<SimRequest>): Promise<KvTransferParams>;
  /** Says so in the trace. */
  kill(engine: SimEngine): Promise<void>;
};

export interface TraceScenario {
  /** The head of the file. */
  readonly about: readonly string[];
  readonly faults?: readonly FaultRule[];
  play(play: TracePlay): Promise<void>;
}

const MAX_LINES = 60;

/**
 * Compares each trace with `{folder}/{name}.txt`, which `npx vitest run FILE -u` writes anew, and
 * which a person likes to read: it is short.
 */
export function traceTests(
  folder: string,
  connector: ConnectorModule,
  scenarios: Readonly<Record<string, TraceScenario>>,
): void {
  it.each(Object.entries(scenarios))("%s", async (name, { about, faults = [], play: run }) => {
    const trace = new Trace();
    const play = createScenario({ connector: trace.observed(connector), faults });
    const engines: SimEngine[] = [];
    await run({
      ...play,
      async engine(hostName, options) {
        const engine = await play.engine(hostName, options);
        engines.push(engine);
        return engine;
      },
      prefilled: (p, n, change) => play.clock.settle(p.prefill({ ...prompt(n), ...change })),
      async kill(engine) {
        await engine.kill();
        trace.killed(engine.engineId);
      },
    });
    const text = `${[...about.map((line) => `# ${line}`), "", trace.text()].join("\n")}\n`;
    for (const { alive, engineId, outstanding } of engines)
      if (alive) expect(trace.heldBy(engineId)).toBe(outstanding().blocks);
    expect(text.split("\n").length).toBeLessThanOrEqual(MAX_LINES);
    await expect(text).toMatchFileSnapshot(`${folder}/${name}.txt`);
    await play.end();
  });

  it("each trace belongs to a scenario", () => {
    const names = Object.keys(scenarios).map((name) => `${name}.txt`);
    expect(readdirSync(folder).filter((file) => !names.includes(file))).toEqual([]);
  });
}
