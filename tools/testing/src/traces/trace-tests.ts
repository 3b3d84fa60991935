import { readdirSync } from "node:fs";
import type { ConnectorModule } from "@kv/interface";
import type { FaultRule } from "@kv/transport-memory";
import { expect, it } from "vitest";
import { createScenario } from "../scenarios/scenario.js";
import type { SimEngine } from "../simulator/sim-engine.js";
import { Trace } from "./trace.js";

export type TracePlay = ReturnType<typeof createScenario> & {
  /** Says so in the trace. */
  kill(engine: SimEngine): Promise<void>;
};

export interface TraceScenario {
  readonly about: readonly string[];
  readonly faults?: readonly FaultRule[];
  /** Time that passes in the end. @default 50 */
  readonly afterMs?: number;
  play(play: TracePlay): Promise<void>;
}

const MAX_LINES = 60;

/** `npx vitest run FILE -u` writes `{folder}/{name}.txt` anew. */
export function traceTests(
  folder: string,
  connector: ConnectorModule,
  scenarios: Readonly<Record<string, TraceScenario>>,
): void {
  it.each(Object.entries(scenarios))(
    "%s",
    async (name, { about, faults = [], afterMs = 50, play: run }) => {
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
        async kill(engine) {
          await engine.kill();
          trace.killed(engine.engineId);
        },
      });
      await play.clock.advance(afterMs);
      const text = `${[...about.map((line) => `# ${line}`), "", trace.text()].join("\n")}\n`;
      for (const { alive, engineId, outstanding } of engines)
        if (alive) expect(trace.heldBy(engineId)).toBe(outstanding().blocks);
      expect(text.split("\n").length).toBeLessThanOrEqual(MAX_LINES);
      await expect(text).toMatchFileSnapshot(`${folder}/${name}.txt`);
      await play.end();
    },
  );

  it("each trace belongs to a scenario", () => {
    const names = Object.keys(scenarios).map((name) => `${name}.txt`);
    expect(readdirSync(folder).filter((file) => !names.includes(file))).toEqual([]);
  });
}
