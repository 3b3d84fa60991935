import { spawn } from "node:child_process";
import { root } from "../setup/setup.mjs";
import type { Row } from "./row.js";

/** Its end says whether the part passed. Its last line may be a row. */
export interface Part {
  readonly name: string;
  readonly command: string;
  readonly args: readonly string[];
  readonly env?: NodeJS.ProcessEnv;
  /** @default no limit */
  readonly limitMs?: number | undefined;
}

const running = new Set<number>();
for (const signal of ["SIGINT", "SIGTERM", "SIGHUP"])
  process.once(signal, () => {
    running.forEach(endGroup);
    process.exit(1);
  });

function endGroup(pid: number) {
  try {
    process.kill(-pid, "SIGKILL");
  } catch {
    // All of them have ended.
  }
}

/** Where the part fails, its output is shown, with the command that replays it. */
export async function runPart({ name, command, args, env = {}, limitMs }: Part): Promise<Row> {
  const begunMs = Date.now();
  const child = spawn(command, args, {
    cwd: root,
    env: { ...env, ...process.env },
    detached: true,
    stdio: ["ignore", "pipe", "pipe"],
  });
  const pid = child.pid ?? 0;
  running.add(pid);
  let output = "";
  for (const stream of [child.stdout, child.stderr])
    stream.on("data", (data: Buffer) => {
      output = (output + data.toString()).slice(-100_000);
    });
  const timer = limitMs && setTimeout(endGroup, limitMs, pid);
  const [code, signal] = await new Promise<unknown[]>((resolve) =>
    child.on("close", (...end) => resolve(end)),
  );
  clearTimeout(timer);
  endGroup(pid);
  running.delete(pid);

  const time = `${((Date.now() - begunMs) / 1000).toFixed(1)} s`;
  const lines = output.trimEnd().split("\n");
  const [told = JSON.stringify({ name, tries: "", result: `ended with ${signal ?? code}` })] =
    /^\{"name":.*\}$/.exec(lines.at(-1) ?? "") ?? [];
  const row: Row = { ...(JSON.parse(told) as Row), ok: code === 0 };
  console.log(`${row.ok ? "ok   " : "FAIL "} ${row.name} (${time})`);
  if (row.ok) return row;

  const words = [...Object.entries(env).map((entry) => entry.join("=")), command, ...args];
  const replay = words.map((word) => (/^[\w./=,-]+$/.test(word) ? word : `'${word}'`));
  console.log(`${lines.slice(-60).join("\n")}\nreplay: ${replay.join(" ")}`);
  return row;
}
