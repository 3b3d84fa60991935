import { count, counted, instanceTimes, ms, setting } from "@kv/fleet/front-end";
import { z } from "zod";

export const BODIES_PER_CLIENT_BYTES = 64 * 1024 * 1024;
export const ABANDONED_PREFILL_MS = 15_000;

const KIB = 1024;
const MIB = 1024 * KIB;

export const limitsSchema = z.strictObject({
  bodyLengthBytes: counted(16 * MIB)`--body-limit-bytes <n>: a client's request body`,
  bodiesLengthBytes: counted(
    128 * MIB,
  )`--bodies-limit-bytes <n>: all request bodies together, until each has
      its answer; the flag sets half of it for one client`,
  bodiesPerClientLengthBytes: setting(count.optional())`the bodies of one client together (default:
      ${BODIES_PER_CLIENT_BYTES / MIB} MiB; of a sidecar all)`,
  bodyDepth: counted(100)`objects and lists inside of one another, in a body`,
  bodyMembers: counted(100_000)`members of objects, and objects and lists, in a body`,
  bodyValues: counted(
    2 * MIB,
  )`elements of lists and members of objects, such as token ids, in a body`,
  connections: setting(
    count.optional(),
  )`--max-connections <n>: clients' connections (default: half of the
      process's descriptors, a third unless the mode is pull; 10,000 at most)`,
  connectionsPerAddress: setting(
    count.optional(),
  )`--max-connections-per-address <n>: connections from one
      address, or from one IPv6 /64 network (default: half of all; of a sidecar all)`,
  pipelinedRequests: setting(
    z.number().int().nonnegative().default(16),
  )`requests on one connection that wait
      for the answers before them`,
  requestsInFlight: setting(
    count.optional(),
  )`--max-requests <n>: requests in flight; each prompt and copy
      counts (default: that of connections)`,
  requestsPerClient: setting(
    count.optional(),
  )`--max-requests-per-client <n>: requests in flight of one client
      (default: half of all; of a sidecar all)`,
  abandonedPrefillMs: setting(
    count.optional(),
  )`time that prefill instances spend on requests of a client which it
      leaves before their answers begin, within timeouts.abandonedWindowMs (default: ${ABANDONED_PREFILL_MS / 1000} s; of a sidecar none)`,
  clientHeader: setting(
    z
      .string()
      .regex(/^[A-Za-z0-9-]+$/)
      .transform((name) => name.toLowerCase())
      .optional(),
  )`--client-header <name>: header by which a trusted front end names the client, for limits per client
      (default: the client is its address)`,
  headersLengthBytes: counted(32 * KIB)`a client's request line and headers`,
  prefillAnswerLengthBytes: counted(
    32 * MIB,
  )`a prefill instance's answer, which may repeat the prompt`,
  heldAnswerLengthBytes: counted(
    4 * MIB,
  )`the part of an answer that is checked before any of it leaves`,
  mergedAnswerLengthBytes: counted(64 * MIB)`all answers together that are merged into one`,
  eventLengthBytes: counted(MIB)`one event of a stream that is merged with others`,
  parts: counted(256)`prompts times copies (n) in one request`,
});

export const timeoutsSchema = z.strictObject({
  connectMs: setting(
    instanceTimes.connectMs,
  )`--connect-timeout-ms <ms>: time limit to connect to an instance`,
  prefillMs: ms(
    300_000,
  )`--prefill-timeout-ms <ms>: time limit of the prefill leg, with the time in the queue`,
  firstByteMs: ms(
    300_000,
  )`--first-byte-timeout-ms <ms>: time limit for the decode leg's first byte`,
  stallMs: ms(
    120_000,
  )`--stall-timeout-ms <ms>: time limit between two chunks of an answer, and for a client to
      read some of it`,
  requestMs: ms(
    3_600_000,
  )`--request-timeout-ms <ms>: time limit of a whole request, with a client's time to read`,
  headersMs: ms(10_000)`time limit for a client to send the head of its request`,
  receiveMs: ms(60_000)`time limit for a client to send its request`,
  abandonedWindowMs: ms(
    30_000,
  )`how long the time of a prefill instance counts that a client has abandoned`,
  keepAliveMs: ms(
    75_000,
  )`how long an idle connection is kept, longer than clients and balancers keep theirs`,
  leaseMs: ms(
    25_000,
  )`--lease-ms <ms>: how long a prefill instance surely holds blocks: its kv_lease_duration
      (vLLM: 30 s) less a margin`,
  releaseMs: ms(10_000)`time limit of the request that frees blocks of an abandoned request`,
  coolDownMs: instanceTimes.coolDownMs,
  maxCoolDownMs: instanceTimes.maxCoolDownMs,
  slowReturnMs: instanceTimes.slowReturnMs,
  graceMs: ms(30_000)`--grace-ms <ms>: time for requests in flight to end at SIGTERM`,
});
