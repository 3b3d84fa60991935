import {
  type BlockIds,
  KvError,
  type KvTransferParams,
  type Random,
  type SideChannel,
  systemRandom,
  type Transport,
} from "@kv/interface";
import { encodeHandshakeRequest, encodeNotification } from "@kv/protocol";
import { decodeIdOf } from "../connector-for.js";
import { type HeadlessDecode, openHeadlessDecode } from "../decode/headless-decode.js";
import { handshakeOf } from "../decode/load.js";
import { mirrorOf } from "../decode/mirror.js";
import { blocksOf, readTold } from "../decode/pull-one.js";
import { silentTransport } from "../decode/silent-transport.js";
import type { EngineServer } from "../server/server.js";
import { blocksOfRegion } from "./blocks-of-region.js";
import type { Manifest, RecordedPrompt, RecordedSide } from "./manifest.js";
import { createRecording, type RecordingWriter } from "./recording.js";

export interface RecordOptions {
  readonly folder: string;
  readonly prefill: EngineServer;
  /** Goes on from the same KV after it was recorded: its tokens are kept too. */
  readonly decode?: EngineServer;
  readonly transport: Transport;
  readonly sideChannel: SideChannel;
  readonly prompts: readonly (readonly number[])[];
  readonly outputTokens?: number;
  /** Where a server that pushes finds this side; loopback and a free port unless given. */
  readonly sideChannelHost?: string;
  readonly sideChannelPort?: number;
  readonly random?: Random;
}

const OUTPUT_TOKENS = 16;
const TIMEOUT_MS = 5000;

/** Stores what a pair of servers says and the KV that goes between them. Errors: the servers', the side channel's, the transport's. */
export async function record(options: RecordOptions): Promise<Manifest> {
  const { prefill, decode, sideChannel, prompts, random = systemRandom() } = options;
  const writer = createRecording(options.folder);
  const silenced = new Set<string>();
  const transport = silentTransport(options.transport, (text) =>
    silenced.has(text.slice(0, text.lastIndexOf(":"))),
  );
  const recorded: RecordedPrompt[] = [];
  let reader: HeadlessDecode | undefined;
  let side: RecordedSide | undefined;
  let tpSize = 1;
  try {
    for (const [index, tokens] of prompts.entries()) {
      const params = await prefill.prefill(tokens);
      const told = readTold(params);
      const isPush = told.transferMode === "push";
      // The decode server says when it has read; two words would free the blocks under it.
      if (decode !== undefined && !isPush) silenced.add(told.remoteRequestId);
      const { metadata, compatibilityHash } = await handshakeOf(told, sideChannel);
      tpSize = told.tpSize;
      side ??= await recordSide(
        "p",
        prefill,
        { host: told.remoteHost, port: told.remotePort, tpSize },
        options,
        writer,
      );
      const numBlocks = 1 + blocksOf(told);
      const { sideChannelHost, sideChannelPort } = options;
      const mirror = mirrorOf(metadata, told, {
        engineId: `kv-peer-${random.uuid()}`,
        numBlocks,
        sideChannelHost,
        sideChannelPort,
      });
      reader = await openHeadlessDecode({
        ...mirror,
        transport,
        sideChannel,
        announcedHash: compatibilityHash,
      });
      const blockIds = numbered(told.remoteBlockIds);
      const request = {
        requestId: decodeIdOf(told, random),
        numPromptTokens: told.remoteNumTokens ?? tokens.length,
        kvTransferParams: params,
      };
      const { failure } = await reader.receive(request, blockIds);
      if (failure !== undefined) throw new KvError(failure.code, failure.message);
      const bytes = joined(
        Array.from({ length: tpSize }, (_, tpRank) =>
          metadata.baseAddresses.flatMap((_, region) =>
            blocksOfRegion(metadata, region, blockIds).map(
              (id) => reader?.block(tpRank, region, id) ?? new Uint8Array(),
            ),
          ),
        ).flat(),
      );
      reader.finish(request, blockIds);
      await reader.close();
      reader = undefined;
      const notification = encodeNotification({ kind: "done", requestId: told.remoteRequestId, readers: 1 });
      recorded.push({
        tokens: [...tokens],
        params: { ...params },
        kv: await writer.kv(`prompt-${index}.bin`, bytes),
        notification: new TextDecoder().decode(notification),
        // What was written once is written to nobody else: the prompt is computed once more.
        ...(isPush ? await onceMore(tokens, options) : await continued(decode, tokens, params, options)),
      });
    }
    if (side === undefined) throw new KvError("KV_CONFIG_INVALID", "there is no prompt to record");
    const other = decode === undefined ? undefined : await decodeSide(decode, options, writer);
    const manifest: Manifest = {
      version: 1,
      tpSize,
      prefill: side,
      ...(other === undefined ? {} : { decode: other }),
      prompts: recorded,
    };
    await writer.finish(manifest);
    return manifest;
  } finally {
    await reader?.close();
  }
}

async function continued(
  decode: EngineServer | undefined,
  tokens: readonly number[],
  params: KvTransferParams,
  { outputTokens = OUTPUT_TOKENS }: RecordOptions,
  requestId?: string,
): Promise<{ made?: number[] }> {
  if (decode === undefined) return {};
  const call = requestId === undefined ? {} : { requestId };
  return { made: [...(await decode.decode(tokens, params, outputTokens, call))] };
}

async function onceMore(tokens: readonly number[], options: RecordOptions): Promise<{ made?: number[] }> {
  const { prefill, decode, random = systemRandom() } = options;
  if (decode === undefined) return {};
  const requestId = random.uuid();
  const params = await prefill.prefill(tokens, { requestId });
  return continued(decode, tokens, params, options, requestId);
}

/** Blocks 1, 2, … in the shape of the server's. */
function numbered(like: BlockIds): BlockIds {
  let next = 1;
  return like.map((ids) => ids.map(() => next++));
}

function joined(parts: readonly Uint8Array[]): Uint8Array {
  const bytes = new Uint8Array(parts.reduce((sum, part) => sum + part.byteLength, 0));
  let offset = 0;
  for (const part of parts) {
    bytes.set(part, offset);
    offset += part.byteLength;
  }
  return bytes;
}

/** The handshake of a decode server, where it keeps a side channel and says where: none of them must. */
async function decodeSide(
  server: EngineServer,
  options: RecordOptions,
  writer: RecordingWriter,
): Promise<RecordedSide | undefined> {
  try {
    const told = readTold(await server.prefill([20, 30]));
    const { remoteHost: host, remotePort: port, tpSize } = told;
    return await recordSide("d", server, { host, port, tpSize }, options, writer);
  } catch {
    return undefined;
  }
}

async function recordSide(
  prefix: string,
  server: EngineServer,
  { host, port, tpSize }: { host: string; port: number; tpSize: number },
  { sideChannel }: RecordOptions,
  writer: RecordingWriter,
): Promise<RecordedSide> {
  const ranks: RecordedSide["ranks"] = [];
  for (let tpRank = 0; tpRank < tpSize; tpRank++) {
    const request = encodeHandshakeRequest({ ppRank: 0, tpRank });
    const { frames } = await sideChannel.request({ host, port, frames: [request], timeoutMs: TIMEOUT_MS });
    const name = `${prefix}.pp0tp${tpRank}`;
    ranks.push({
      tpRank,
      request: await writer.frame(`${name}.req.bin`, request),
      reply: await Promise.all(frames.map((frame, index) => writer.frame(`${name}.rep${index}.bin`, frame))),
    });
  }
  const [vllmVersion, model] = await Promise.all([
    server.version().catch(() => undefined),
    server.model().catch(() => undefined),
  ]);
  return {
    url: server.url,
    ...(vllmVersion === undefined ? {} : { vllmVersion }),
    ...(model === undefined ? {} : { model: model.root ?? model.id }),
    ranks,
  };
}
