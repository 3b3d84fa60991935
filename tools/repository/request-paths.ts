import type { ConnectorModule } from "@kv/interface";
import { createScenario } from "@kv/testing/scenarios/scenario";

/** A warm request of one way of the data: everything is open, and a request has passed before. */
export interface WarmRequest {
  /** Runs the request to its end. */
  run(): Promise<void>;
  close(): Promise<void>;
}

/** The part of a way that one table of docs/architecture.md describes. */
export interface PathTable {
  /** Heading of the table. */
  readonly heading: string;
  /** Name of the module whose files it lists. */
  readonly module: string;
  /** Files that run for the other half of an engine, which gets an empty step. */
  readonly otherHalf?: RegExp;
  /** The most files that may run, without `LEFT_OUT`. The number only goes down. */
  readonly most: number;
}

/** A way of the data through the code. */
export interface RequestPath {
  /** Modules that are loaded, each with a copy of all that it imports, by name. */
  readonly modules: Readonly<Record<string, string>>;
  readonly tables: readonly PathTable[];
  /** Brings the modules to where the next request is a warm one. */
  start(modules: Readonly<Record<string, unknown>>): Promise<WarmRequest>;
}

/** Files that have no row, and why. */
export const LEFT_OUT: readonly (readonly [files: RegExp, why: string])[] = [
  [/^packages\/interface\//, "contracts"],
  [/^packages\/(plan|protocol|topology)\//, "pure functions: plans, wire forms, mappings of ranks"],
  [/\/(index|building-blocks)\.ts$/, "barrels"],
  [/\/(step-types|step-metadata)\.ts$/, "types and checks of them"],
  [/\/(receive-error|peer-errors)\.ts$/, "errors"],
  [/\/(metrics|tracing|log|config)\//, "metrics, tracing, log and configuration"],
  [/\/(oldest-first|alias-index|task-tracker|engine-address)\.ts$/, "containers and keys"],
];

const DECODE_HALF = /\/(decode-worker|decode-requests|remote-requests|(pull|push)\/src\/scheduler)\.ts$/;
const PREFILL_HALF = /\/prefill-(worker|scheduler)\.ts$/;

/** Two simulated engines on the memory transport; each has a connector of its own. */
function connectorPath(name: "pull" | "push", most: { readonly d: number; readonly p: number }): RequestPath {
  const file = `packages/${name}/src/index.ts`;
  const title = name === "pull" ? "Pull" : "Push";
  return {
    modules: { [`${name}-d`]: file, [`${name}-p`]: file },
    tables: [
      { heading: `${title}: D`, module: `${name}-d`, otherHalf: PREFILL_HALF, most: most.d },
      { heading: `${title}: P`, module: `${name}-p`, otherHalf: DECODE_HALF, most: most.p },
    ],
    async start(modules) {
      const connector = (side: string) =>
        (modules[`${name}-${side}`] as { readonly default: ConnectorModule }).default;
      const scenario = createScenario();
      const d = await scenario.engine("d", { connector: connector("d") });
      const p = await scenario.engine("p", { connector: connector("p") });
      const request = async (number: number) => {
        const outcome = await scenario.handedOver(p, d, number);
        if (outcome !== "ok") throw new Error(`request ${number} of ${name} ended with ${outcome}`);
        // P frees the blocks.
        await scenario.clock.advance(1000);
      };
      await request(1);
      return { run: () => request(2), close: () => scenario.end() };
    },
  };
}

/** The ways that are measured. */
export const REQUEST_PATHS: readonly RequestPath[] = [
  connectorPath("pull", { d: 10, p: 9 }),
  connectorPath("push", { d: 11, p: 12 }),
];
