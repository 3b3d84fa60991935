import type { Clock } from "./ambient.js";
/** Options of a `YieldingQueue`. */
export interface YieldingQueueOptions {
    /** Measures the steps, and waits between them. */
    readonly clock: Clock;
    /**
     * Steps that run in one turn of the event loop.
     * @default 1
     */
    readonly stepsPerTurn?: number | undefined;
    /**
     * For how many ms a step of `run` calls `next()` again: for work whose `next()` takes
     * microseconds. 0: once.
     * @default 0
     */
    readonly sliceMs?: number | undefined;
}
/**
 * Runs long work in steps, in order, and yields to the event loop between them, so that other
 * requests are served meanwhile. The steps take at most a quarter of the time, with the promise
 * callbacks that they cause.
 */
export declare class YieldingQueue {
    #private;
    constructor({ clock, stepsPerTurn, sliceMs }: YieldingQueueOptions);
    /** Steps that wait. */
    get length(): number;
    /** Runs `step` in a later turn of the event loop. */
    push(step: () => void): void;
    /** Resolves in a later turn of the event loop; what its caller does then is a step. */
    turn(): Promise<void>;
    /**
     * Runs `work` up to its end, each `next()` as a step of its own, or as many as `sliceMs` allows.
     * Resolves with what it returns, and rejects with what it throws.
     */
    run<T>(work: Iterator<unknown, T>): Promise<T>;
}
