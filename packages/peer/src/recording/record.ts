import { ambient, KvError, type SideChannel } from "@kv/interface";
import type { RemotePrefillParams } from "@kv/protocol";
import type { Reach } from "../headless/headless-engine.js";
import { filterNotifications } from "../headless/notification-filter.js";
import { type EngineServer, PROBE_PROMPT } from "../http/engine-server.js";
import { type GivenGroups, groupKinds, kindsOf } from "../protocol/cache-groups.js";
import { exchangeHandshake, readRankMetadata } from "../protocol/handshake.js";
import { readDoneText, readRemotePrefill } from "../protocol/remote-prefill.js";
import { receiveKv } from "./receive-kv.js";
import {
  createRecording,
  type Manifest,
  type RecordedPrompt,
  type RecordedSide,
  type RecordingWriter,
} from "./recording.js";

/** Options of `record`. */
export interface RecordOptions extends Reach {
  readonly folder: string;
  readonly prefill: EngineServer;
  /**
   * Continues from the same KV after it was recorded; its tokens are recorded too.
   */
  readonly decode?: EngineServer | undefined;
  readonly prompts: readonly (readonly number[])[];
  /**
   * The kind of each KV cache group, where handshakes do not say them; kept in the recording for
   * `diffRecordings`.
   */
  readonly groups?: GivenGroups | undefined;
  /** Tokens that the decode server generates per prompt. @default 16 */
  readonly outputTokens?: number | undefined;
}

const OUTPUT_TOKENS = 16;

/**
 * Records a running pair: the handshakes of every rank, and for each prompt `kv_transfer_params`,
 * the KV, and the tokens of the decode server. The manifest is written last.
 *
 * @throws those of the servers, the side channel and the transport; `KV_CONFIG_INVALID` without
 * prompts.
 */
export async function record(options: RecordOptions): Promise<Manifest> {
  const { prefill, decode, groups, sideChannel, outputTokens = OUTPUT_TOKENS } = options;
  const { random } = ambient(options);
  const writer = createRecording(options.folder);
  const filter = filterNotifications(options.transport);
  const reach = { ...options, transport: filter.transport };
  const prompts: RecordedPrompt[] = [];
  let tpSize = 1;
  let prefillSide: RecordedSide | undefined;

  for (const tokens of options.prompts) {
    const params = await prefill.prefill(tokens);
    const remote = readRemotePrefill(params);
    const isPush = remote.transferMode === "push";
    // The decode server reads the same blocks and notifies P. A second notification would free them
    // too early.
    if (decode !== undefined && !isPush) filter.drop(remote.remoteRequestId);
    tpSize = remote.tpSize;
    if (prefillSide === undefined && groups !== undefined) {
      // Groups that the server does not have are refused before anything is written.
      const address = { host: remote.remoteHost, port: remote.remotePort };
      const { metadata } = await readRankMetadata(sideChannel, address);
      groupKinds(metadata, remote.remoteBlockIds.length, groups);
    }
    prefillSide ??= await recordSide("p", prefill, remote, sideChannel, writer);
    const kv = await receiveKv({ tokens, params, remote }, reach);
    // P pushes a prompt to one receiver only: for the decode server it computes the prompt again.
    const requestId = isPush ? random.uuid() : undefined;
    const forDecode = decode && isPush ? await prefill.prefill(tokens, { requestId }) : params;
    const made = await decode?.decode(tokens, forDecode, outputTokens, { requestId });
    prompts.push({
      tokens: [...tokens],
      params: { ...params },
      kv: await writer.kv(`prompt-${prompts.length}.bin`, kv),
      notification: readDoneText(remote.remoteRequestId),
      made: made && [...made],
    });
  }

  if (prefillSide === undefined)
    throw new KvError("KV_CONFIG_INVALID", "there is no prompt to record");
  const manifest: Manifest = {
    version: 1,
    tpSize,
    prefill: prefillSide,
    decode: decode && (await recordDecodeSide(decode, sideChannel, writer)),
    ...(groups === undefined ? {} : { groups: kindsOf(groups) as Manifest["groups"] }),
    prompts,
  };
  await writer.finish(manifest);
  return manifest;
}

/**
 * The handshakes of the decode server; undefined when it does not announce a side channel. A pull D
 * does not need one.
 */
async function recordDecodeSide(
  server: EngineServer,
  sideChannel: SideChannel,
  writer: RecordingWriter,
): Promise<RecordedSide | undefined> {
  try {
    const remote = readRemotePrefill(await server.prefill(PROBE_PROMPT));
    return await recordSide("d", server, remote, sideChannel, writer);
  } catch {
    return undefined;
  }
}

async function recordSide(
  prefix: string,
  server: EngineServer,
  { remoteHost: host, remotePort: port, tpSize }: RemotePrefillParams,
  sideChannel: SideChannel,
  writer: RecordingWriter,
): Promise<RecordedSide> {
  const ranks: RecordedSide["ranks"] = [];
  for (let tpRank = 0; tpRank < tpSize; tpRank++) {
    const { request, reply } = await exchangeHandshake(sideChannel, { host, port }, { tpRank });
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
