import type { ConnectorModule, KvTransferParams, SideChannel, Transport } from "@kv/interface";
import { decodeHandshakeReply, decodeNotification, encodeHandshakeRequest } from "@kv/protocol";
import { memorySideChannel, seededRandom } from "@kv/transport-memory";
import fc from "fast-check";
import { ForgedNotifications } from "../forged-notifications.js";
import { createScenario } from "../scenarios/scenario.js";
import { coordinatesOf, outcomeOf, type SimEngine } from "../simulator/sim-engine.js";
import {
  FORGED_FOR_DECODE,
  FORGED_FOR_PREFILL,
  FORGED_PARAMS,
  type Known,
  OTHER_PROMPTS,
  POISONING_PARAMS,
} from "./attacks.js";
import { believing, copying, type TakenOut, withProof } from "./taken-out.js";

interface HonestRequest {
  readonly atMs: number;
  readonly waitMs: number;
  readonly numTokens: number;
  /** Under an id that nobody can guess. Push only. */
  readonly atOnce: boolean;
}

interface Attack {
  readonly atMs: number;
  /** `TABLE: NAME` of the tables of `attacks.ts`. */
  readonly move: string;
  readonly victim: number;
  readonly copies: boolean;
}

/** Users and attackers at one P and one D. */
export interface Scene {
  readonly seed: number;
  readonly prefillTp: number;
  readonly decodeTp: number;
  readonly requests: readonly HonestRequest[];
  readonly attacks: readonly Attack[];
}

export interface SceneOptions {
  readonly connector?: ConnectorModule;
  readonly keyFile?: string;
  readonly takenOut?: TakenOut;
}

const TABLES = {
  params: FORGED_PARAMS,
  poison: POISONING_PARAMS,
  prefill: FORGED_FOR_PREFILL,
  decode: FORGED_FOR_DECODE,
  client: OTHER_PROMPTS,
} as const;

const MOVES = Object.entries(TABLES).flatMap(([table, moves]) =>
  Object.keys(moves).map((name) => `${table}: ${name}`),
);

export function sceneArbitrary({ atOnce = false } = {}): fc.Arbitrary<Scene> {
  return fc.record({
    seed: fc.nat(),
    prefillTp: fc.constantFrom(1, 2),
    decodeTp: fc.constantFrom(1, 2),
    requests: fc.array(
      fc.record({
        atMs: fc.nat(60),
        waitMs: fc.nat(80),
        numTokens: fc.integer({ min: 1, max: 80 }),
        atOnce: atOnce ? fc.boolean() : fc.constant(false),
      }),
      { minLength: 1, maxLength: 4 },
    ),
    attacks: fc.array(
      fc.record({
        atMs: fc.nat(140),
        move: fc.constantFrom(...MOVES),
        victim: fc.nat(3),
        copies: fc.boolean(),
      }),
      { maxLength: 6 },
    ),
  });
}

/** Longer than a lease and a request's deadline. */
const END_MS = 120_000;

/**
 * Returns what must not happen: a user's request that does not end well, bytes of another prompt in
 * D's blocks, KV of a stranger's listener that D may cache, and metadata for a stranger without the
 * key. Without a key, the bytes of attackers' own requests that `POISONING_PARAMS` or a copy of P's
 * process brought in are excluded.
 */
export async function playScene(
  scene: Scene,
  options: SceneOptions = {},
): Promise<readonly string[]> {
  const { connector, keyFile, takenOut } = options;
  const random = seededRandom(`isolation ${scene.seed}`);
  const { clock, network, sleep, ...play } = createScenario({ connector, random });
  const found: string[] = [];
  const poisoned = new Set<string>();
  /** Their parameters lead to a listener that names no process. */
  const plainRequests = new Set<string>();
  const users = new Set<string>();
  const capabilities = new Map<string, string>();
  const secrets = new Map<string, string>();
  const ofDecode = { incarnation: "d" };
  let incarnation = "";
  const atPrefill = injectableTransport((payload) =>
    takenOut === "capability"
      ? withProof(payload, "capability", (id) => capabilities.get(id))
      : payload,
  );
  const atDecode = injectableTransport(
    (payload) =>
      takenOut === "secret" ? withProof(payload, "secret", (id) => secrets.get(id)) : payload,
    (payload) => rememberRegistration(payload, secrets, ofDecode),
  );
  const extra = {
    require_kv_peer: true,
    kv_lease_duration: 6,
    request_timeout: 15,
    decoder_kv_blocks_ttl: 20,
    ...(keyFile === undefined ? {} : { handshake_key_file: keyFile }),
  };
  const numBlocks = 96;
  const both = { numBlocks, extra, handsEqualTokens: takenOut === "prompt" };
  const p = await play.engine("p", {
    ...both,
    tpSize: scene.prefillTp,
    wrapTransport: atPrefill.wrap,
  });
  const ofD = memorySideChannel({ network, host: "d" });
  const trusting = { process: "rogue", blocks: "p" }[takenOut as string];
  const d = await play.engine("d", {
    ...both,
    tpSize: scene.decodeTp,
    received(requestId, isVerified) {
      if (plainRequests.has(requestId) && isVerified)
        found.push(
          `D may cache the KV of request ${requestId}, which no P compared with its prompt`,
        );
      if (users.has(requestId) && !isVerified)
        found.push(`D does not cache the KV of the user's ${requestId}`);
    },
    wrapTransport: atDecode.wrap,
    ...(trusting === undefined ? {} : { sideChannel: believing(ofD, () => incarnation, trusting) }),
  });
  const decodeHost = { host: "d", port: d.address.port };
  const stranger = { engineId: "p", numBlocks, tpSize: scene.prefillTp };
  const plainRogue = await play.engine("rogue", { ...stranger, plain: true });
  const copyOf = memorySideChannel({ network, host: "copy" });
  const copy = await play.engine("copy", {
    ...stranger,
    sideChannel: copying(copyOf, () => incarnation),
  });
  const garbage = { requestId: "garbage", prompt: 999_983, numTokens: 1500 };
  await clock.settle(Promise.all([plainRogue.prefill(garbage), copy.prefill(garbage)]));

  const ofStranger = memorySideChannel({ network, host: "stranger" });
  const ids = seededRandom(`ids ${scene.seed}`);
  const params = new Map<number, KvTransferParams>();

  async function honest(
    { atMs, waitMs, numTokens, atOnce }: HonestRequest,
    n: number,
  ): Promise<void> {
    await sleep(atMs);
    const unguessable = `cmpl-${ids.uuid()}`;
    const prefillId = atOnce ? `${unguessable}-00000001` : `r${n}`;
    const prefilled = p.prefill({ requestId: prefillId, prompt: n, numTokens }).then((answer) => {
      if (!atOnce) params.set(n, answer);
      const { capability, incarnation: process } = answer.kv_peer as Record<string, string>;
      capabilities.set(String(answer.remote_request_id), String(capability));
      incarnation = String(process);
      return answer;
    });
    if (!atOnce) await prefilled;
    await sleep(atOnce ? 0 : waitMs);
    const given = atOnce ? coordinatesOf(p, unguessable) : await prefilled;
    const requestId = atOnce ? `${unguessable}-00000002` : `d${n}`;
    users.add(requestId);
    const outcome = await outcomeOf(d.decode({ requestId, prompt: n, numTokens, params: given }));
    if (outcome !== "ok") found.push(`the request of user ${n} ended with ${outcome}`);
  }

  async function attack({ atMs, move, victim, copies }: Attack, n: number) {
    await sleep(atMs);
    const [table, name] = move.split(": ") as [keyof typeof TABLES, string];
    const of = params.get(victim % scene.requests.length);
    if (of === undefined) return;
    const prompt = 10_000 + n;
    const numTokens = Number(of.remote_num_tokens);
    const ownId = `cmpl-own${n}-00000001`;
    const own = await p.prefill({ requestId: ownId, prompt, numTokens });
    if (table === "client") {
      const change = OTHER_PROMPTS[name as keyof typeof OTHER_PROMPTS](
        { prompt: victim % scene.requests.length, numTokens },
        prompt,
      );
      // Push finds a request by its id where the parameters name no process.
      const given = copies ? coordinatesOf(p, `cmpl-own${n}`) : own;
      const requestId = `cmpl-own${n}-00000002`;
      await outcomeOf(d.decode({ requestId, numTokens, params: given, ...change }));
      return;
    }
    const rogue = copies ? copy : plainRogue;
    const port = rogue.address.port;
    const known: Known = {
      victim: of,
      own,
      decodeRequestId: `d${victim % scene.requests.length}`,
      rogue: { host: copies ? "copy" : "rogue", port },
      decode: { ...decodeHost, incarnation: ofDecode.incarnation, tpSize: scene.decodeTp },
    };
    const make = (TABLES[table] as Record<string, (known: Known) => unknown>)[name];
    const forged = make?.(known);
    if (forged instanceof Uint8Array) {
      for (let round = 0; round < 20; round++) {
        (table === "prefill" ? atPrefill : atDecode).inject(forged);
        await sleep(3);
      }
    } else {
      const requestId = `x${n}`;
      const { remote_host, remote_port } = forged as KvTransferParams;
      const isToListener = remote_host === known.rogue.host && remote_port === port;
      const isPoison = table === "poison" || (copies && isToListener);
      if (keyFile === undefined && isPoison) poisoned.add(requestId);
      if (isToListener && !copies) plainRequests.add(requestId);
      await outcomeOf(
        d.decode({ requestId, prompt, numTokens, params: forged as KvTransferParams }),
      );
    }
    if (keyFile !== undefined && (await learns(ofStranger, p)))
      found.push("a stranger without the key got the metadata of P");
  }

  const all = Promise.all([...scene.requests.map(honest), ...scene.attacks.map(attack)]);
  await clock.settle(all, { limitMs: END_MS }).catch((error: unknown) => {
    found.push(`something did not end: ${String(error)}`);
  });
  await ofStranger.close();
  // A stranger's engine may hold a registration of D until its time is up.
  const isStrangers = (what: string) => /^(rogue|copy): /.test(what);
  for (const what of await play.close(END_MS))
    if (!isStrangers(what) && ![...poisoned].some((id) => what.includes(`request ${id} `)))
      found.push(what);
  return found;
}

async function learns(sideChannel: SideChannel, { address }: SimEngine): Promise<boolean> {
  const frames = [encodeHandshakeRequest({ ppRank: 0, tpRank: 0 })];
  try {
    const reply = await sideChannel.request({ ...address, host: "p", frames, timeoutMs: 1000 });
    decodeHandshakeReply(reply.frames);
    return true;
  } catch {
    return false;
  }
}

function rememberRegistration(
  payload: Uint8Array,
  secrets: Map<string, string>,
  decode: { incarnation: string },
): void {
  const sent = decodeNotification(payload);
  if (sent.kind !== "push-registration") return;
  const { request_id, kv_peer } = sent.registration;
  const { secret, incarnation } = (kv_peer ?? {}) as { secret?: unknown; incarnation?: unknown };
  secrets.set(String(request_id), String(secret));
  decode.incarnation = String(incarnation);
}

/**
 * Agents get forged notifications besides the real ones. `rewrite` changes each payload on its way:
 * so a test takes out a check of the receiver.
 */
function injectableTransport(
  rewrite: (payload: Uint8Array) => Uint8Array = (payload) => payload,
  sent: (payload: Uint8Array) => void = () => {},
) {
  const inboxes: ((payload: Uint8Array) => void)[] = [];
  return {
    /** As from each agent that the receiver knows, and from an unknown one. */
    inject(payload: Uint8Array): void {
      for (const inbox of inboxes) inbox(payload);
    },
    wrap: (transport: Transport): Transport => ({
      ...transport,
      async createAgent(options) {
        const agent = await transport.createAgent(options);
        const known = new Set<string>();
        const inbox = new ForgedNotifications(agent);
        inboxes.push((payload) =>
          inbox.add(...["a stranger", ...known].map((from) => ({ from, payload }))),
        );
        return {
          ...agent,
          async addRemote(metadata) {
            const name = await agent.addRemote(metadata);
            known.add(name);
            return name;
          },
          async notify(remote, payload) {
            sent(payload);
            await agent.notify(remote, payload);
          },
          async *notifications() {
            for await (const { from, payload } of inbox.all())
              yield { from, payload: rewrite(payload) };
          },
        };
      },
    }),
  };
}
