import type { ClockSample } from "@kv/connector/building-blocks";
import { KvError, type SideChannel } from "@kv/interface";
import {
  decodeAgentMetadata,
  decodeHandshakeRefusal,
  decodeHandshakeReply,
  encodeHandshakeRequest,
  type HandshakePayload,
} from "@kv/protocol";
import type { Check } from "../report/check.js";
import type { Role, Side } from "./side.js";
import { isLoopback, isWildcard } from "./target.js";

export interface Address {
  readonly host: string;
  readonly port: number;
}

export interface LookSideChannelOptions {
  readonly role: Role;
  readonly sideChannel: SideChannel;
  readonly timeoutMs: number;
  /** Where peers are sent to: what the server told, else what the user gave, else vLLM's default. */
  readonly address: Address & { readonly from: "told" | "given" | "default" };
  /** The host under which this one reaches the server; undefined when only the side channel was named. */
  readonly serverHost: string | undefined;
  /** The peer runs on another host, as far as the targets say. */
  readonly peerIsElsewhere: boolean;
  readonly toldEngineId: string | undefined;
}

type Found = Pick<Side, "address" | "payload" | "metadata" | "clockSamples">;
const NOTHING: Found = { address: undefined, payload: undefined, metadata: undefined, clockSamples: [] };

/** Asks rank (0, 0) twice, no other: a rank that vLLM 0.33 does not have ends its listener for good. */
export async function lookSideChannel(
  options: LookSideChannelOptions,
): Promise<{ found: Found; checks: Check[] }> {
  const { role, address } = options;
  const checks: Check[] = [];
  const add = (id: string, rest: Omit<Check, "id" | "area">) =>
    checks.push({ id: `${role}.${id}`, area: role, ...rest });
  if (address.from === "told") add("side-channel-host", hostCheck(options));

  let asked: Asked;
  try {
    asked = await ask(options, address);
  } catch (thrown) {
    const error = KvError.from(thrown, "KV_SIDE_CHANNEL_UNREACHABLE", "side channel");
    const elsewhere = await foundElsewhere(options);
    const fix = elsewhere === undefined ? error.hint : fixHost(elsewhere.host);
    const also = elsewhere === undefined ? "" : `\nit answers at ${elsewhere.host}:${elsewhere.port}`;
    add("side-channel", {
      title: "side channel",
      status: "fail",
      found: `${error.message}${also}${address.from === "default" ? `\n(the default port: --${role}-side-channel gives another)` : ""}`,
      ...(fix === undefined ? {} : { fix }),
      details: { code: error.code, ...address },
    });
    return { found: NOTHING, checks };
  }
  const { payload, samples } = asked;
  add("side-channel", {
    title: "side channel",
    status: "ok",
    found: `${address.host}:${address.port} answers for rank (0, 0) in ${Math.min(...samples.map(rtt)).toFixed(1)} ms`,
  });

  try {
    const metadata = decodeAgentMetadata(payload.agentMetadataBytes);
    add("metadata", describe(metadata));
    if (options.toldEngineId !== undefined)
      add("engine-id", engineCheck(metadata.engineId, options.toldEngineId));
    return { found: { address, payload, metadata, clockSamples: samples }, checks };
  } catch (thrown) {
    const error = KvError.from(thrown, "KV_WIRE_MALFORMED", "agent metadata");
    add("metadata", {
      title: "metadata",
      status: "fail",
      found: error.message,
      fix: "its connector may be newer than version 15, or no NixlConnector: compare the versions",
    });
    return { found: { ...NOTHING, address, payload, clockSamples: samples }, checks };
  }
}

interface Asked {
  readonly payload: HandshakePayload;
  readonly samples: readonly ClockSample[];
}

async function ask({ sideChannel, timeoutMs }: LookSideChannelOptions, address: Address): Promise<Asked> {
  const samples: ClockSample[] = [];
  let payload: HandshakePayload | undefined;
  for (let time = 0; time < 2; time++) {
    const reply = await sideChannel.request({
      host: address.host,
      port: address.port,
      frames: [encodeHandshakeRequest({ ppRank: 0, tpRank: 0 })],
      timeoutMs,
    });
    const refusal = decodeHandshakeRefusal(reply.frames);
    if (refusal !== undefined) throw new KvError("KV_HANDSHAKE_REFUSED", `it refused: ${refusal}`);
    const decoded = decodeHandshakeReply(reply.frames);
    payload = decoded.payload;
    const { sentAtMs, receivedAtMs } = reply;
    if (decoded.clockSeconds !== undefined)
      samples.push({ sentAtMs, receivedAtMs, remoteSeconds: decoded.clockSeconds });
  }
  if (payload === undefined || samples.length === 0) {
    throw new KvError(
      "KV_HANDSHAKE_INCOMPATIBLE",
      "it did not tell its clock: its connector is older than version 5",
      {
        hint: "upgrade the server to vLLM 0.32 or later",
      },
    );
  }
  return { payload, samples };
}

/** A server that announces an address which leads nowhere often listens under its own name. */
async function foundElsewhere(options: LookSideChannelOptions): Promise<Address | undefined> {
  const { serverHost, address } = options;
  if (serverHost === undefined || serverHost === address.host) return undefined;
  const other = { host: serverHost, port: address.port };
  return ask(options, other).then(
    () => other,
    () => undefined,
  );
}

function hostCheck({
  address,
  serverHost,
  peerIsElsewhere,
}: LookSideChannelOptions): Omit<Check, "id" | "area"> {
  const title = "side-channel host";
  const { host } = address;
  const isRemote = serverHost !== undefined && !isLoopback(serverHost);
  if (isWildcard(host)) {
    const found = `it announces ${host}, which is an address to listen on, not one to connect to`;
    return { title, status: "fail", found, fix: fixHost(serverHost) };
  }
  if (isLoopback(host) && (isRemote || peerIsElsewhere)) {
    return {
      title,
      status: "fail",
      found: `it announces ${host}: a peer on another host reaches itself there, or nobody`,
      fix: fixHost(isRemote ? serverHost : undefined),
    };
  }
  if (isLoopback(host)) {
    return { title, status: "ok", found: `it announces ${host}, which serves a pair on one host only` };
  }
  return { title, status: "ok", found: `it announces ${host}` };
}

function engineCheck(found: string, told: string): Omit<Check, "id" | "area"> {
  if (found === told) return { title: "engine id", status: "ok", found };
  return {
    title: "engine id",
    status: "fail",
    found: `its HTTP server says engine ${told}, and engine ${found} answers at its side channel`,
    fix: "two servers share a side-channel port, or one was restarted: give each its own VLLM_NIXL_SIDE_CHANNEL_PORT",
  };
}

function describe(metadata: NonNullable<Side["metadata"]>): Omit<Check, "id" | "area"> {
  const { regionMemoryTypes, blockSize, numBlocks, kvCacheLayout, attentionBackend } = metadata;
  const regions = metadata.baseAddresses.length;
  const memory = [...new Set(regionMemoryTypes ?? ["memory of unknown type"])].join(" and ");
  const logical = metadata.physicalBlocksPerLogical;
  return {
    title: "metadata",
    status: "ok",
    found:
      `${regions} regions of ${numBlocks} blocks in ${memory}, ${blockSize} tokens a kernel block` +
      `${logical > 1 ? `, ${logical} of them a block` : ""}, ${kvCacheLayout}, ${attentionBackend}`,
    details: {
      regions,
      numBlocks,
      blockSize,
      kvCacheLayout,
      attentionBackend,
      physicalBlocksPerLogical: logical,
    },
  };
}

function fixHost(host: string | undefined): string {
  return `set VLLM_NIXL_SIDE_CHANNEL_HOST=${host ?? "<an address that the peer reaches>"} on that server and restart it`;
}

const rtt = ({ sentAtMs, receivedAtMs }: ClockSample) => receivedAtMs - sentAtMs;
