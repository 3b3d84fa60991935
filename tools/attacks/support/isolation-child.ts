import { fork } from "node:child_process";
import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { callsTo } from "../../faults/child-calls.js";
import type { IsolationFunctions } from "./isolation-engines.js";

/** A P, a D and a listener of an attacker in a process of their own, whose functions are called. */
export function isolationEngines() {
  const child = fork(fileURLToPath(new URL("./isolation-engines.ts", import.meta.url)), {
    execArgv: ["--import", "tsx"],
    stdio: ["ignore", "ignore", "inherit", "ipc"],
  });
  return {
    call: callsTo<IsolationFunctions>(
      child,
      () => new Error("the process of the engines has ended"),
    ),
    rssMib(): number {
      const pages = Number(readFileSync(`/proc/${child.pid}/statm`, "utf8").split(" ")[1]);
      return Math.round((pages * 4096) / 2 ** 20);
    },
    close: () => child.disconnect(),
  };
}
