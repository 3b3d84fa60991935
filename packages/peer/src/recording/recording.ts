import { createHash } from "node:crypto";
import { mkdir, readFile, writeFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { KvError } from "@kv/interface";
import {
  type AgentMetadata,
  decodeAgentMetadata,
  decodeHandshakeReply,
  type HandshakePayload,
} from "@kv/protocol";
import { type Manifest, manifestSchema, type RecordedPrompt, type RecordedSide } from "./manifest.js";

/** A folder with a manifest, frames of handshakes and KV. */
export interface Recording {
  readonly folder: string;
  readonly manifest: Manifest;
  /** What each rank of a side answered, in the order of its ranks. */
  handshakes(side: RecordedSide): Promise<readonly RecordedHandshake[]>;
  /** A prompt's KV: rank after rank, in each region after region, in each the request's kernel blocks in order. */
  kv(prompt: RecordedPrompt): Promise<Uint8Array>;
}

export interface RecordedHandshake {
  readonly tpRank: number;
  readonly payload: HandshakePayload;
  readonly metadata: AgentMetadata;
}

const MANIFEST = "manifest.json";

/** Opens a recording and checks its manifest. Errors: `KV_CONFIG_INVALID`, naming the file and what is wrong; KV is checked when it is read. */
export async function openRecording(folder: string): Promise<Recording> {
  const file = join(folder, MANIFEST);
  const text = await readFile(file, "utf8").catch((error: unknown) => {
    throw new KvError("KV_CONFIG_INVALID", `${file} cannot be read: ${(error as Error).message}`, {
      hint: "make a recording with: kv-peer record --prefill URL --to DIR",
      cause: error,
    });
  });
  const manifest = manifestOf(text, file);
  return {
    folder,
    manifest,
    async handshakes(side) {
      const read = (name: string) => bytesOf(join(folder, name));
      return Promise.all(
        side.ranks.map(async ({ tpRank, reply }) => {
          const { payload } = decodeHandshakeReply(await Promise.all(reply.map(read)));
          return { tpRank, payload, metadata: decodeAgentMetadata(payload.agentMetadataBytes) };
        }),
      );
    },
    async kv({ kv }) {
      const bytes = await bytesOf(join(folder, kv.file));
      const sha256 = digest(bytes);
      if (bytes.byteLength === kv.lengthBytes && sha256 === kv.sha256) return bytes;
      throw new KvError(
        "KV_CONFIG_INVALID",
        `${join(folder, kv.file)} has ${bytes.byteLength} bytes with SHA-256 ${sha256}, recorded were ${kv.lengthBytes} with ${kv.sha256}`,
        { hint: "the file was changed or cut off: record again" },
      );
    },
  };
}

/** Writes files of a recording as they come, folders with the first of them, and the manifest last: a folder without one is no recording. */
export interface RecordingWriter {
  frame(name: string, bytes: Uint8Array): Promise<string>;
  kv(name: string, bytes: Uint8Array): Promise<RecordedPrompt["kv"]>;
  finish(manifest: Manifest): Promise<void>;
}

export function createRecording(folder: string): RecordingWriter {
  async function write(name: string, content: Uint8Array | string): Promise<string> {
    const file = join(folder, name);
    await mkdir(dirname(file), { recursive: true });
    await writeFile(file, content);
    return name;
  }
  return {
    frame: (name, bytes) => write(`frames/${name}`, bytes),
    async kv(name, bytes) {
      const file = await write(`kv/${name}`, bytes);
      return { file, lengthBytes: bytes.byteLength, sha256: digest(bytes) };
    },
    async finish(manifest) {
      await write(MANIFEST, `${JSON.stringify(manifestSchema.parse(manifest), null, 1)}\n`);
    },
  };
}

function manifestOf(text: string, file: string): Manifest {
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw KvError.from(error, "KV_CONFIG_INVALID", `${file} is not JSON`);
  }
  const parsed = manifestSchema.safeParse(value);
  if (parsed.success) return parsed.data;
  const [issue] = parsed.error.issues;
  throw new KvError(
    "KV_CONFIG_INVALID",
    `${file}: ${issue?.path.join(".") ?? ""}: ${issue?.message ?? "invalid"}`,
  );
}

async function bytesOf(file: string): Promise<Uint8Array> {
  try {
    // Not a Buffer, whose `slice` would share memory.
    return new Uint8Array(await readFile(file));
  } catch (error) {
    throw KvError.from(error, "KV_CONFIG_INVALID", `${file} cannot be read`);
  }
}

const digest = (bytes: Uint8Array) => createHash("sha256").update(bytes).digest("hex");
