import type {
  FoundLengths,
  KeepAnswer,
  KeptObject,
  KeptObjects,
  PinnedStatus,
} from "@kv/fleet/front-end";

type Soon<T> = T | Promise<T>;

/**
 * Where the objects of ended turns are kept: `KeptObjects` of this process, or of the process that
 * all workers belong to.
 */
export interface ObjectStore {
  keep(object: KeptObject, budget: number): Soon<KeepAnswer>;
  find(chunks: readonly string[]): Soon<FoundLengths>;
  claim(digests: readonly string[]): Soon<KeptObject | undefined>;
  tokensOf(digests: readonly string[]): Soon<number>;
  giveBack(object: KeptObject): Soon<void>;
  releasing(object: KeptObject): Soon<void>;
  ended(object: KeptObject): Soon<void>;
  drop(): Soon<readonly KeptObject[]>;
  status(): Soon<readonly PinnedStatus[]>;
}

/** A call of a method in another process. Arguments and results are plain data. */
export interface ObjectCall {
  readonly method: keyof ObjectStore;
  readonly args: readonly unknown[];
}

/** The store of another process. */
export function objectsByCalls(call: <T>(call: ObjectCall) => Promise<T>): ObjectStore {
  return {
    keep: (...args) => call({ method: "keep", args }),
    find: (...args) => call({ method: "find", args }),
    claim: (...args) => call({ method: "claim", args }),
    tokensOf: (...args) => call({ method: "tokensOf", args }),
    giveBack: (...args) => call({ method: "giveBack", args }),
    releasing: (...args) => call({ method: "releasing", args }),
    ended: (...args) => call({ method: "ended", args }),
    drop: () => call({ method: "drop", args: [] }),
    status: () => call({ method: "status", args: [] }),
  };
}

/** Answers a call of `objectsByCalls`. */
export function answerObjectCall(objects: KeptObjects, { method, args }: ObjectCall): unknown {
  return (objects[method] as (...args: readonly unknown[]) => unknown).call(objects, ...args);
}
