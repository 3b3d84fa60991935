import { ambient, KvError, type KvTransferParams, type Random } from "@kv/interface";
import type { RemotePrefillParams } from "@kv/protocol";
import type { Reach } from "../headless/headless-engine.js";
import { filterNotifications, type NotificationFilter } from "../headless/notification-filter.js";
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
   * Continues from the same KV after it was recorded; its tokens are recorded too. @default
   * undefined
   */
  readonly decode?: EngineServer | undefined;
  readonly prompts: readonly (readonly number[])[];
  /**
   * The kind of each KV cache group, where handshakes do not say them; kept in the recording for
   * `diffRecordings`. @default undefined
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
  const recorder = new Recorder(options);
  for (const tokens of options.prompts) await recorder.recordPrompt(tokens);
  return await recorder.finish();
}

class Recorder {
  readonly #options: RecordOptions;
  readonly #random: Random;
  readonly #writer: RecordingWriter;
  readonly #filter: NotificationFilter;
  readonly #prompts: RecordedPrompt[] = [];
  #prefillSide: RecordedSide | undefined;
  #tpSize = 1;

  constructor(options: RecordOptions) {
    this.#options = options;
    this.#random = ambient(options).random;
    this.#writer = createRecording(options.folder);
    this.#filter = filterNotifications(options.transport);
  }

  async recordPrompt(tokens: readonly number[]): Promise<void> {
    const { prefill, decode } = this.#options;
    const params = await prefill.prefill(tokens);
    const remote = readRemotePrefill(params);
    const isPush = remote.transferMode === "push";
    // The decode server reads the same blocks and notifies P. A second notification would free them
    // too early.
    if (decode !== undefined && !isPush) this.#filter.drop(remote.remoteRequestId);
    this.#tpSize = remote.tpSize;
    if (this.#prefillSide === undefined) await this.#checkGroups(remote);
    this.#prefillSide ??= await this.#recordSide("p", prefill, remote);
    const place = { ...this.#options, transport: this.#filter.transport, random: this.#random };
    const kv = await receiveKv({ tokens, params, remote }, place);
    this.#prompts.push({
      tokens: [...tokens],
      params: { ...params },
      kv: await this.#writer.kv(`prompt-${this.#prompts.length}.bin`, kv),
      notification: readDoneText(remote.remoteRequestId),
      // P pushes a prompt to one receiver only: for the decode server it computes the prompt again.
      made: await (isPush ? this.#recompute(tokens) : this.#continue(tokens, params)),
    });
  }

  /** Refuses groups that the server does not have before anything is written. */
  async #checkGroups({
    remoteHost: host,
    remotePort: port,
    remoteBlockIds,
  }: RemotePrefillParams): Promise<void> {
    const { groups, sideChannel } = this.#options;
    if (groups === undefined) return;
    const { metadata } = await readRankMetadata(sideChannel, { host, port });
    groupKinds(metadata, remoteBlockIds.length, groups);
  }

  async finish(): Promise<Manifest> {
    const { decode } = this.#options;
    if (this.#prefillSide === undefined)
      throw new KvError("KV_CONFIG_INVALID", "there is no prompt to record");
    const manifest: Manifest = {
      version: 1,
      tpSize: this.#tpSize,
      prefill: this.#prefillSide,
      decode: decode === undefined ? undefined : await this.#recordDecodeSide(decode),
      ...(this.#options.groups === undefined
        ? {}
        : { groups: kindsOf(this.#options.groups) as Manifest["groups"] }),
      prompts: this.#prompts,
    };
    await this.#writer.finish(manifest);
    return manifest;
  }

  /**
   * The tokens that the decode server generates from this KV; undefined without a decode server.
   */
  async #continue(
    tokens: readonly number[],
    params: KvTransferParams,
    requestId?: string,
  ): Promise<number[] | undefined> {
    const { decode, outputTokens = OUTPUT_TOKENS } = this.#options;
    if (decode === undefined) return undefined;
    return [...(await decode.decode(tokens, params, outputTokens, { requestId }))];
  }

  async #recompute(tokens: readonly number[]): Promise<number[] | undefined> {
    const { prefill, decode } = this.#options;
    if (decode === undefined) return undefined;
    const requestId = this.#random.uuid();
    const params = await prefill.prefill(tokens, { requestId });
    return await this.#continue(tokens, params, requestId);
  }

  /**
   * The handshakes of the decode server; undefined when it does not announce a side channel. A pull
   * D does not need one.
   */
  async #recordDecodeSide(server: EngineServer): Promise<RecordedSide | undefined> {
    try {
      return await this.#recordSide(
        "d",
        server,
        readRemotePrefill(await server.prefill(PROBE_PROMPT)),
      );
    } catch {
      return undefined;
    }
  }

  async #recordSide(
    prefix: string,
    server: EngineServer,
    { remoteHost: host, remotePort: port, tpSize }: RemotePrefillParams,
  ): Promise<RecordedSide> {
    const ranks: RecordedSide["ranks"] = [];
    for (let tpRank = 0; tpRank < tpSize; tpRank++) {
      const { request, reply } = await exchangeHandshake(
        this.#options.sideChannel,
        { host, port },
        { tpRank },
      );
      const name = `${prefix}.pp0tp${tpRank}`;
      ranks.push({
        tpRank,
        request: await this.#writer.frame(`${name}.req.bin`, request),
        reply: await Promise.all(
          reply.frames.map((frame, index) => this.#writer.frame(`${name}.rep${index}.bin`, frame)),
        ),
      });
    }
    const [vllmVersion, model] = await Promise.all([
      server.version().catch(() => undefined),
      server.model().catch(() => undefined),
    ]);
    return { url: server.url, vllmVersion, model: model?.root ?? model?.id, ranks };
  }
}
