import { KvError } from "@kv/interface";

/** How a call ends: "done", the code of its `KvError`, or another error as text. */
export const codeOf = (call: Promise<unknown>): Promise<string> =>
  call.then(
    () => "done",
    (error: unknown) => (KvError.is(error) ? error.code : String(error)),
  );
