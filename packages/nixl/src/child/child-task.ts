import { KvError } from "@kv/interface";
import type { ChildOptions } from "@kv/program";
import { requireHere } from "../require-here.js";

/**
 * A child process with a task of `main.ts`. Throws `KV_TRANSPORT_UNAVAILABLE` in a bundle that left
 * that file out.
 */
export function childTask(task: string, ...args: readonly string[]): ChildOptions {
  try {
    return { module: requireHere.resolve("@kv/nixl/child"), args: [task, ...args] };
  } catch (error) {
    throw new KvError(
      "KV_TRANSPORT_UNAVAILABLE",
      "the module @kv/nixl/child, which another process runs, is not beside this program: a bundler has left it out",
      {
        hint: 'keep @kv/nixl out of the bundle (see "Bundlers and containers" in its README)',
        cause: error,
      },
    );
  }
}
