import { ambient, type BlockIds, KvError, type SideChannel } from "@kv/interface";
import type { RemotePrefillParams } from "@kv/protocol";
import type { Reach } from "../headless/headless-engine.js";
import {
  decodeRequest,
  filterNotifications,
  type MatchingDecode,
  openMatchingDecode,
  type PrefilledPrompt,
  prefillPrompt,
} from "../headless/matching-decode.js";
import { type EngineServer, PROBE_PROMPT } from "../http/engine-server.js";
import {
  type GivenGroups,
  groupKinds,
  kernelBlocksOfRegion,
  kindsOf,
} from "../protocol/cache-groups.js";
import {
  exchangeHandshake,
  readDoneText,
  readRankMetadata,
  sideChannelOf,
} from "../protocol/remote-engine.js";
import {
  createRecording,
  type Manifest,
  type RecordedPrompt,
  type RecordedSide,
  type RecordingWriter,
} from "./recording.js";

/**
 * Returns a prompt's KV by rank, region and kernel block. `isReadAgain`: D reads the same blocks
 * next and notifies a pull P.
 *
 * @throws those of `openMatchingDecode`; the code of the failed receive.
 */
export async function receiveKv(
  prompt: PrefilledPrompt,
  { isReadAgain, ...reach }: Reach & { readonly isReadAgain?: boolean },
): Promise<Uint8Array> {
  if (!isReadAgain || prompt.remote.transferMode === "push")
    return await receiveOnce(prompt, reach);
  // A second notification would free the blocks too early.
  const { transport, drop } = filterNotifications(reach.transport);
  drop(prompt.remote.remoteRequestId);
  try {
    return await receiveOnce(prompt, { ...reach, transport });
  } catch (error) {
    await release(prompt, reach);
    throw error;
  }
}

async function receiveOnce(
  prompt: PrefilledPrompt,
  reach: Reach,
  signal?: AbortSignal,
): Promise<Uint8Array> {
  const { remote } = prompt;
  const matching = await openMatchingDecode(remote, 1, reach);
  await using decode = matching.decode;
  const blockIds = consecutiveIds(remote.remoteBlockIds);
  const request = decodeRequest(prompt, ambient(reach).random);
  const { failure, aborted } = await decode.receive(request, blockIds, { signal });
  if (aborted) throw new KvError("KV_REQUEST_ABORTED", "the KV did not arrive in time");
  if (failure !== undefined) throw new KvError(failure.code, failure.message);
  const kv = copyBlocks(matching, remote.tpSize, blockIds);
  decode.finish(request, blockIds);
  return kv;
}

/** Frees what a server keeps for a prompt that nobody else reads. */
export async function release(prompt: PrefilledPrompt, reach: Reach): Promise<void> {
  // What cannot be read is freed by the end of its lease.
  await receiveOnce(prompt, reach, AbortSignal.timeout(RELEASE_MS)).catch(() => {});
}

/** P pushes to one receiver only, so it computes the prompt again for D. */
export async function decodeAfter(
  prompt: PrefilledPrompt,
  { prefill, decode }: { readonly prefill: EngineServer; readonly decode: EngineServer },
  outputTokens: number,
  reach: Reach,
): Promise<readonly number[]> {
  const { tokens, remote } = prompt;
  const isPush = remote.transferMode === "push";
  const call = isPush ? { requestId: ambient(reach).random.uuid() } : undefined;
  const kept = isPush ? await prefillPrompt(prefill, tokens, call) : prompt;
  try {
    return await decode.decode(tokens, kept.params, outputTokens, call);
  } catch (error) {
    await release(kept, reach);
    throw error;
  }
}

function consecutiveIds(like: BlockIds): BlockIds {
  let next = 1;
  return like.map((ids) => ids.map(() => next++));
}

function copyBlocks(
  { decode, metadata }: MatchingDecode,
  tpSize: number,
  blockIds: BlockIds,
): Uint8Array {
  const blocks: Uint8Array[] = [];
  for (let tpRank = 0; tpRank < tpSize; tpRank++)
    for (const region of metadata.baseAddresses.keys())
      for (const id of kernelBlocksOfRegion(metadata, region, blockIds))
        blocks.push(decode.block(tpRank, region, id));
  // The blocks are views of memory that is freed next.
  return new Uint8Array(Buffer.concat(blocks));
}

/** Options of `record`. */
export interface RecordOptions extends Reach {
  readonly folder: string;
  readonly prefill: EngineServer;
  /** Continues from the recorded KV; its tokens are recorded too. */
  readonly decode?: EngineServer | undefined;
  readonly prompts: readonly (readonly number[])[];
  /** Where handshakes do not say them; `diffRecordings` needs them. */
  readonly groups?: GivenGroups | undefined;
  /** Tokens that D generates per prompt. @default 16 */
  readonly outputTokens?: number | undefined;
  /** Ends the recording after the prompt in progress. */
  readonly signal?: AbortSignal | undefined;
  /** Gets the number of recorded prompts. */
  readonly progress?: ((done: number) => void) | undefined;
}

const OUTPUT_TOKENS = 16;
const RELEASE_MS = 5_000;

/**
 * Records every rank's handshake and each prompt's `kv_transfer_params`, KV and D's tokens. The
 * manifest is written last.
 *
 * @throws those of the servers, the side channel and the transport; `KV_CONFIG_INVALID` without
 * prompts; `KV_REQUEST_ABORTED`.
 */
export async function record(options: RecordOptions): Promise<Manifest> {
  const { prefill, decode, groups, sideChannel, outputTokens = OUTPUT_TOKENS } = options;
  const { signal, ...reach } = options;
  const writer = createRecording(options.folder);
  const prompts: RecordedPrompt[] = [];
  let tpSize = 1;
  let prefillSide: RecordedSide | undefined;

  for (const tokens of options.prompts) {
    requireGoingOn(signal);
    const prompt = await prefillPrompt(prefill, tokens);
    const { params, remote } = prompt;
    tpSize = remote.tpSize;
    try {
      if (prefillSide === undefined && groups !== undefined) {
        // Refuses wrong groups before anything is written.
        const { metadata } = await readRankMetadata(sideChannel, sideChannelOf(remote));
        groupKinds(metadata, remote.remoteBlockIds.length, groups);
      }
      prefillSide ??= await recordSide("p", prefill, remote, sideChannel, writer);
    } catch (error) {
      await release(prompt, reach);
      throw error;
    }
    const kv = await receiveKv(prompt, { ...reach, isReadAgain: decode !== undefined });
    const made = decode && (await decodeAfter(prompt, { prefill, decode }, outputTokens, reach));
    prompts.push({
      tokens: [...tokens],
      params: { ...params },
      kv: await writer.kv(`prompt-${prompts.length}.bin`, kv),
      notification: readDoneText(remote.remoteRequestId),
      made: made && [...made],
    });
    options.progress?.(prompts.length);
  }

  requireGoingOn(signal);
  if (prefillSide === undefined)
    throw new KvError("KV_CONFIG_INVALID", "there is no prompt to record");
  const manifest: Manifest = {
    version: 1,
    tpSize,
    prefill: prefillSide,
    decode: decode && (await recordDecodeSide(decode, reach, writer)),
    ...(groups === undefined ? {} : { groups: kindsOf(groups) as Manifest["groups"] }),
    prompts,
  };
  await writer.finish(manifest);
  return manifest;
}

function requireGoingOn(signal: AbortSignal | undefined): void {
  if (signal?.aborted !== true) return;
  throw new KvError("KV_REQUEST_ABORTED", "the recording was interrupted, and is not complete");
}

/** Undefined when no side channel is announced; a pull D need not have one. */
async function recordDecodeSide(
  server: EngineServer,
  reach: Reach,
  writer: RecordingWriter,
): Promise<RecordedSide | undefined> {
  let prompt: PrefilledPrompt | undefined;
  try {
    prompt = await prefillPrompt(server, PROBE_PROMPT);
    return await recordSide("d", server, prompt.remote, reach.sideChannel, writer);
  } catch {
    return undefined;
  } finally {
    if (prompt !== undefined) await release(prompt, reach);
  }
}

async function recordSide(
  prefix: string,
  server: EngineServer,
  remote: RemotePrefillParams,
  sideChannel: SideChannel,
  writer: RecordingWriter,
): Promise<RecordedSide> {
  const ranks: RecordedSide["ranks"] = [];
  for (let tpRank = 0; tpRank < remote.tpSize; tpRank++) {
    const address = sideChannelOf(remote);
    const { request, reply } = await exchangeHandshake(sideChannel, address, { tpRank });
    const name = `${prefix}.pp0tp${tpRank}`;
    ranks.push({
      tpRank,
      request: await writer.frame(`${name}.req.bin`, request),
      reply: await Promise.all(
        reply.frames.map((frame, index) => writer.frame(`${name}.rep${index}.bin`, frame)),
      ),
    });
  }
  const [vllmVersion, model] = await Promise.all([
    server.version().catch(() => undefined),
    server.model().catch(() => undefined),
  ]);
  return { url: server.url, vllmVersion, model: model?.root ?? model?.id, ranks };
}
