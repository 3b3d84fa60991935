import { createHash } from "node:crypto";
import { constants } from "node:fs";
import { mkdir, open, writeFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { KV_CACHE_KINDS, KvError } from "@kv/interface";
import {
  type AgentMetadata,
  decodeAgentMetadata,
  decodeHandshakeReply,
  type HandshakePayload,
} from "@kv/protocol";
import { z } from "zod";

const fileName = z.string().regex(/^(frames|kv)\/[A-Za-z0-9._-]{1,100}$/);
const rankSchema = z.object({
  tpRank: z.int().min(0).max(65_535),
  request: fileName,
  reply: z.array(fileName).min(1).max(2),
});
const sideSchema = z.object({
  url: z.string().max(2048).optional(),
  vllmVersion: z.string().max(200).optional(),
  model: z.string().max(4096).optional(),
  ranks: z.array(rankSchema).min(1).max(4096),
});

const promptSchema = z.object({
  tokens: z.array(z.int().min(0)).min(1).max(4_000_000),
  params: z.record(z.string(), z.unknown()).describe("The server's kv_transfer_params."),
  kv: z.object({
    file: fileName,
    lengthBytes: z.int().min(0),
    sha256: z.string().regex(/^[0-9a-f]{64}$/),
  }),
  notification: z
    .string()
    .max(1024)
    .describe("The notification after which the server frees the blocks."),
  made: z
    .array(z.int())
    .optional()
    .describe("The tokens that the decode server generated from this KV."),
});

/** The schema of a recording's `manifest.json`. */
export const manifestSchema = z.object({
  version: z.literal(1),
  tpSize: z.int().min(1).max(4096),
  prefill: sideSchema,
  decode: sideSchema.optional(),
  groups: z
    .array(z.enum(KV_CACHE_KINDS))
    .max(64)
    .optional()
    .describe("The kind of each KV cache group, where the user has given them."),
  prompts: z.array(promptSchema).min(1).max(10_000),
});
/** The servers and prompts, with the files of their handshakes and KV. */
export type Manifest = z.infer<typeof manifestSchema>;
/** One server and the files of its handshakes. */
export type RecordedSide = z.infer<typeof sideSchema>;
/** A recorded prompt: its tokens, the server's parameters and the file of its KV. */
export type RecordedPrompt = z.infer<typeof promptSchema>;

/** A folder with a manifest, handshake frames and KV. */
export interface Recording {
  readonly folder: string;
  readonly manifest: Manifest;
  /**
   * The handshake of each rank, in the manifest's order.
   *
   * @throws `KV_CONFIG_INVALID`, `KV_WIRE_MALFORMED`.
   */
  handshakes(side: RecordedSide): Promise<readonly RecordedHandshake[]>;
  /**
   * A prompt's KV, by rank, region and kernel block.
   *
   * @throws `KV_CONFIG_INVALID` when the file's length or SHA-256 is not the recorded one.
   */
  kv(prompt: RecordedPrompt): Promise<Uint8Array>;
}

/** The recorded handshake of one rank. */
export interface RecordedHandshake {
  readonly tpRank: number;
  readonly payload: HandshakePayload;
  readonly metadata: AgentMetadata;
}

const MANIFEST = "manifest.json";
const MAX_MANIFEST_BYTES = 256 << 20;
const MAX_FRAME_BYTES = 32 << 20;

/**
 * Opens a recording. The manifest is validated now, the KV when it is read.
 *
 * @throws `KV_CONFIG_INVALID` with the file and the reason.
 */
export async function openRecording(folder: string): Promise<Recording> {
  const file = join(folder, MANIFEST);
  const bytes = await readBytes(file, MAX_MANIFEST_BYTES).catch((error: KvError) => {
    throw new KvError("KV_CONFIG_INVALID", error.message, {
      hint: "make a recording with: kv-peer record --prefill URL --to DIR",
      cause: error,
    });
  });
  const manifest = parseManifest(new TextDecoder().decode(bytes), file);
  return {
    folder,
    manifest,
    async handshakes(side) {
      const read = (name: string) => readBytes(join(folder, name), MAX_FRAME_BYTES);
      return Promise.all(
        side.ranks.map(async ({ tpRank, reply }) => {
          const { payload } = decodeHandshakeReply(await Promise.all(reply.map(read)));
          return { tpRank, payload, metadata: decodeAgentMetadata(payload.agentMetadataBytes) };
        }),
      );
    },
    async kv({ kv }) {
      const bytes = await readBytes(
        join(folder, kv.file),
        Math.max(kv.lengthBytes, MAX_FRAME_BYTES),
      );
      const sha256 = digest(bytes);
      if (bytes.byteLength === kv.lengthBytes && sha256 === kv.sha256) return bytes;
      throw new KvError(
        "KV_CONFIG_INVALID",
        `${join(folder, kv.file)} has ${bytes.byteLength} bytes with SHA-256 ${sha256}; recorded were ${kv.lengthBytes} bytes with ${kv.sha256}`,
        { hint: "the file was changed or truncated: record again" },
      );
    },
  };
}

/** Writes a recording, the manifest last: a folder without one is not a recording. */
export interface RecordingWriter {
  /** Resolves with the path for the manifest. */
  frame(name: string, bytes: Uint8Array): Promise<string>;
  /** Resolves with the manifest's entry. */
  kv(name: string, bytes: Uint8Array): Promise<RecordedPrompt["kv"]>;
  finish(manifest: Manifest): Promise<void>;
}

/** Starts a recording in `folder`, which the first file creates. */
export function createRecording(folder: string): RecordingWriter {
  async function write(name: string, content: Uint8Array | string): Promise<string> {
    const file = join(folder, name);
    await mkdir(dirname(file), { recursive: true });
    // Prompts and their KV are for their owner only.
    await writeFile(file, content, { mode: 0o600 });
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

function parseManifest(text: string, file: string): Manifest {
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

async function readBytes(file: string, maxBytes: number): Promise<Uint8Array> {
  try {
    await using handle = await open(file, constants.O_RDONLY | constants.O_NONBLOCK);
    const stats = await handle.stat();
    if (!stats.isFile()) throw new KvError("KV_CONFIG_INVALID", `${file} is not a file`);
    if (stats.size > maxBytes)
      throw new KvError(
        "KV_CONFIG_INVALID",
        `${file} has ${stats.size} bytes; the limit is ${maxBytes}`,
      );
    const bytes = new Uint8Array(stats.size);
    let length = 0;
    while (length < bytes.byteLength) {
      const { bytesRead } = await handle.read(bytes, length);
      if (bytesRead === 0) break;
      length += bytesRead;
    }
    return bytes.subarray(0, length);
  } catch (error) {
    throw KvError.from(error, "KV_CONFIG_INVALID", `${file} cannot be read`);
  }
}

const digest = (bytes: Uint8Array) => createHash("sha256").update(bytes).digest("hex");
