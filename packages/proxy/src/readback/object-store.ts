import type { KeptObjects } from "@kv/fleet/front-end";

const METHODS = [
  "keep",
  "find",
  "claim",
  "tokensOf",
  "giveBack",
  "releasing",
  "ended",
  "drop",
  "status",
] as const;
type Method = (typeof METHODS)[number];

/** Keeps the objects of ended turns: `KeptObjects` of this process or of the workers' primary. */
export type ObjectStore = {
  readonly [M in Method]: (
    ...args: Parameters<KeptObjects[M]>
  ) => ReturnType<KeptObjects[M]> | Promise<ReturnType<KeptObjects[M]>>;
};

export interface ObjectCall {
  readonly method: Method;
  readonly args: readonly unknown[];
}

export function objectsByCalls(call: (call: ObjectCall) => Promise<unknown>): ObjectStore {
  const calls = METHODS.map((method) => [
    method,
    (...args: readonly unknown[]) => call({ method, args }),
  ]);
  return Object.fromEntries(calls) as ObjectStore;
}

export function answerObjectCall(objects: KeptObjects, { method, args }: ObjectCall): unknown {
  return (objects[method] as (...args: readonly unknown[]) => unknown).call(objects, ...args);
}
