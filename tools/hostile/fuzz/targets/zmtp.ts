import {
  curveClient,
  curveKeyPair,
  curveKeysOf,
  curveServer,
} from "../../../../packages/side-channel/src/zmtp/curve.js";
import {
  type ZmtpMechanism,
  ZmtpSession,
} from "../../../../packages/side-channel/src/zmtp/session.js";
import { bytes, type FuzzTarget } from "../target.js";

// So that the recorded bytes of one side fit the other.
const fixed = {
  keys: () => [KEYS],
  random: (count: number) => new Uint8Array(count).fill(7),
  newKeyPair: () => PAIR,
};
const KEYS = curveKeysOf(bytes("a key of at least sixteen bytes, for the fuzzer"));
const PAIR = curveKeyPair(new Uint8Array(32).fill(9));
const limits = { maxFrames: 16, maxMessageBytes: 16_384 };

function router(isCurve: boolean): ZmtpSession {
  const socketType = "ROUTER";
  const mechanism = isCurve ? curveServer({ socketType, ...fixed }) : undefined;
  return new ZmtpSession({ socketType, peerTypes: ["REQ", "DEALER"], ...limits, mechanism });
}

function req(isCurve: boolean): ZmtpSession {
  const socketType = "REQ";
  const mechanism: ZmtpMechanism | undefined = isCurve
    ? curveClient({ socketType, ...fixed })
    : undefined;
  return new ZmtpSession({ socketType, peerTypes: ["ROUTER"], ...limits, mechanism });
}

function answers(session: ZmtpSession, received: Uint8Array): Uint8Array {
  session.push(received);
  const sent: Uint8Array[] = [];
  for (let event = session.read(); event !== undefined; event = session.read())
    if (event.type === "send") sent.push(...event.chunks);
  return Buffer.concat(sent);
}

/** What one side receives, after a byte that selects the side and the mechanism. */
function seedsOf(isCurve: boolean): Uint8Array[] {
  const [server, client] = [router(isCurve), req(isCurve)];
  const toServer = [client.greeting];
  const toClient = [server.greeting];
  for (let at = 0; at < 6; at += 1) {
    const [next, reply] = [toServer[at], toClient[at]];
    if (next !== undefined) toClient.push(answers(server, next));
    if (reply !== undefined) toServer.push(answers(client, reply));
  }
  const frames = [new Uint8Array(0), bytes("a message")];
  toServer.push(...client.encode(frames));
  toClient.push(...server.encode(frames));
  const flag = isCurve ? 2 : 0;
  return [
    Buffer.concat([Uint8Array.of(flag), ...toServer]),
    Buffer.concat([Uint8Array.of(flag + 1), ...toClient]),
  ];
}

/** As listener and as client. */
export const zmtp: FuzzTarget = {
  seeds: [...seedsOf(false), ...seedsOf(true)],
  words: ["PING", "ERROR"],
  read(input) {
    const [choice = 0] = input;
    const session = (choice & 1) === 0 ? router((choice & 2) !== 0) : req((choice & 2) !== 0);
    answers(session, input.subarray(1));
  },
};
