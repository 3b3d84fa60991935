import { createRequire } from "node:module";
import type { ChildOptions } from "@kv/program";

/** What starts a process that runs a task of `main.ts`, with these arguments. */
export function childTask(task: string, ...args: readonly string[]): ChildOptions {
  return { module: createRequire(import.meta.url).resolve("@kv/nixl/child"), args: [task, ...args] };
}
