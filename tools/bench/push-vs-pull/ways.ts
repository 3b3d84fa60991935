import { BLOCK_TOKENS, type Point } from "./workload.js";

export const WAYS = ["pull", "push", "push, layer-wise"] as const;
export type Way = (typeof WAYS)[number];

export function perWay<T>(of: (way: Way) => T): Record<Way, T> {
  return Object.fromEntries(WAYS.map((way) => [way, of(way)])) as Record<Way, T>;
}

/** How many times longer pull takes. */
export function gainOf(
  { ttftMs }: { readonly ttftMs: Readonly<Record<Way, number>> },
  way: Way,
): number {
  return ttftMs.pull / ttftMs[way];
}

/**
 * The options of a demo cluster of one P and one D that differ neither between processes nor
 * between this process and others.
 */
export function clusterOf<S extends object>(way: Way, pool: Point["pool"], simulate: S) {
  return {
    connector: way === "pull" ? "NixlConnector" : "push",
    pushLayerwise: way === "push, layer-wise",
    prefills: 1,
    decodes: 1,
    prefillTp: 1,
    decodeTp: 1,
    prefillBlockSize: BLOCK_TOKENS,
    decodeBlockSize: BLOCK_TOKENS,
    instance: { simulate, fragmented: pool === "fragmented", digests: false },
  } as const;
}

/** The processes that a request passes; the client is this one. */
export const PROCESSES = ["client", "proxy", "prefill", "decode"] as const;
export type ProcessTimes = Readonly<Record<(typeof PROCESSES)[number], number>>;

/**
 * Processor time in each process: of its JavaScript thread, on which a request waits, and of its
 * other threads, which work beside it.
 */
export interface ThreadTimes {
  readonly main: ProcessTimes;
  readonly beside: ProcessTimes;
}

/**
 * Processor time that a request takes of each process's threads: for itself with one token, and for
 * each further token.
 */
export interface ProcessorCosts {
  readonly requestMs: ThreadTimes;
  readonly tokenMs: ThreadTimes;
}

/** What the rounds at one point of the sample say. */
export interface Measured {
  readonly point: Point;
  /** The times of all rounds. */
  readonly roundsMs: Readonly<Record<Way, readonly number[]>>;
  /** Their medians. */
  readonly ttftMs: Readonly<Record<Way, number>>;
  readonly costs: Readonly<Record<Way, ProcessorCosts>>;
  /** The forward pass + bytes ÷ measured bandwidth; 0 for a full prefix hit. */
  readonly boundMs: number;
  /** D's own time to the first token; only for a full prefix hit. */
  readonly localMs: number | undefined;
}

export function timesOf(of: (name: keyof ProcessTimes) => number): ProcessTimes {
  return Object.fromEntries(PROCESSES.map((name) => [name, of(name)])) as Record<
    keyof ProcessTimes,
    number
  >;
}
