import { spawn } from "node:child_process";
import { once } from "node:events";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";

/**
 * A Python process with an agent and memory of a device or of the host; see
 * `children/device_peer.py`.
 */
export interface PythonPeer {
  readonly name: string;
  readonly address: number;
  readonly deviceId: number;
  readonly metadata: Uint8Array;
  /** SHA-256 of its memory, in hex. */
  hash(): Promise<string>;
  /** Ends it; returns its exit code. */
  end(): Promise<number | null>;
}

export interface PythonPeerOptions {
  readonly library: string;
  /**
   * Of CUDA's driver, of PyTorch's allocator without and with expandable segments, or of the host.
   */
  readonly memory: "cuda" | "torch" | "torch-expandable" | "host";
  readonly device: number;
  readonly lengthBytes: number;
}

export async function startPythonPeer(options: PythonPeerOptions): Promise<PythonPeer> {
  const { library, memory, device, lengthBytes } = options;
  const script = fileURLToPath(new URL("../children/device_peer.py", import.meta.url));
  const child = spawn(
    "python3",
    [script, library, memory, String(device), String(lengthBytes), "7"],
    {
      stdio: ["pipe", "pipe", "pipe"],
      // The variables that the addon sets for NIXL in this process.
      env: { UCX_MODULES: "^ib", UCX_LOG_FILE: "stderr", ...process.env },
    },
  );
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
  const { metadata, ...place } = (await answer()) as Omit<PythonPeer, "metadata"> & {
    metadata: string;
  };
  return {
    ...place,
    metadata: Buffer.from(metadata, "base64"),
    async hash() {
      child.stdin.write("hash\n");
      return (await answer()) as string;
    },
    async end() {
      const exited = once(child, "exit");
      child.stdin.end();
      const [code] = (await exited) as [number | null];
      return code;
    },
  };
}
