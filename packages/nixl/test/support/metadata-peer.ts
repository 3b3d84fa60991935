import { spawn } from "node:child_process";
import { once } from "node:events";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";

/**
 * A process with an agent of NIXL that exchanges metadata by itself; see
 * `children/metadata_peer.py`.
 */
export interface MetadataPeer {
  readonly address: number;
  readonly lengthBytes: number;
  /** Sends a command; returns the answer. */
  ask(command: string): Promise<unknown>;
  /** Ends it. */
  end(): Promise<void>;
}

export async function startMetadataPeer(options: {
  readonly library: string;
  readonly name: string;
  readonly port?: number;
  readonly env?: Readonly<Record<string, string>>;
}): Promise<MetadataPeer> {
  const { library, name, port = 0, env } = options;
  const script = fileURLToPath(new URL("../children/metadata_peer.py", import.meta.url));
  const child = spawn("python3", [script, library, name, String(port)], {
    stdio: ["pipe", "pipe", "pipe"],
    // The variables that the addon sets for NIXL in this process.
    env: { UCX_MODULES: "^ib", UCX_LOG_FILE: "stderr", ...process.env, ...env },
  });
  let complaints = "";
  child.stderr.setEncoding("utf8").on("data", (text: string) => {
    complaints += text;
  });
  const lines = createInterface({ input: child.stdout })[Symbol.asyncIterator]();
  const answer = async (): Promise<unknown> => {
    const { value, done } = await lines.next();
    if (done === true) throw new Error(`the peer ended: ${complaints}`);
    return JSON.parse(value as string);
  };
  const place = (await answer()) as { address: number; lengthBytes: number };
  return {
    ...place,
    async ask(command) {
      child.stdin.write(`${command}\n`);
      return await answer();
    },
    async end() {
      const exited = once(child, "exit");
      child.stdin.end();
      await exited;
    },
  };
}
