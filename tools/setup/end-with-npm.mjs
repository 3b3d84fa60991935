import { spawn } from "node:child_process";
import { readFileSync } from "node:fs";

/**
 * Ends this process by SIGTERM when its parent has ended: at SIGTERM, npm ends its shell, and not
 * what the shell runs. Outside of `npm run`, nothing is watched.
 */
export function endWithNpm() {
  if (process.env.npm_lifecycle_event === undefined) return;
  const parent = process.ppid;
  const end = () => process.kill(process.pid, "SIGTERM");
  // The shell has ended before this line: another process, of another group, has taken its place.
  if (groupOf(parent) !== groupOf(process.pid)) end();
  const timer = setInterval(() => {
    if (process.ppid === parent) return;
    clearInterval(timer);
    end();
  }, 200);
  timer.unref();
}

/** Undefined where the system does not tell it. */
function groupOf(pid) {
  try {
    const stat = readFileSync(`/proc/${pid}/stat`, "utf8");
    return stat.slice(stat.lastIndexOf(")") + 2).split(" ")[2];
  } catch {
    return undefined;
  }
}

/**
 * A program that calls `endWithOwner` gets each signal once, from here, and ends with this process.
 */
export function runProgram(module, args) {
  const child = spawn(process.execPath, [module, ...args], {
    // The program ends when this channel closes.
    stdio: ["inherit", "inherit", "inherit", "ipc"],
    // The terminal's signals reach this process alone.
    detached: true,
  });
  for (const signal of ["SIGINT", "SIGTERM", "SIGHUP"])
    process.on(signal, () => child.kill(signal));
  child.on("close", (code, signal) => {
    process.exitCode = code ?? (signal === "SIGINT" ? 130 : 143);
  });
}
