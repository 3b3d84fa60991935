/** A release of vLLM whose wire is described here. */
export interface VllmVersion {
  /** Such as "0.33.0"; its patch releases have the same wire. */
  readonly version: string;
  /** vLLM's `NIXL_CONNECTOR_VERSION`. */
  readonly connectorVersion: number;
  /**
   * `transfers`: `npm run test:vllm` moves KV to and from real servers. `handshake`: tools read its
   * handshake and say what to upgrade.
   */
  readonly support: "transfers" | "handshake";
  /**
   * A D of this release silently mixes up heads and tokens of blocks from a P with smaller blocks.
   * Seen on the CPU; the likely cause is `kv_postprocess_blksize_on_receive`, which 0.32 rewrote
   * (read, not isolated).
   */
  readonly mixesUpSmallerBlocks?: true;
}

const VERSIONS = [
  { version: "0.27.1", connectorVersion: 5, support: "handshake" },
  { version: "0.28.0", connectorVersion: 7, support: "handshake" },
  { version: "0.29.0", connectorVersion: 9, support: "handshake" },
  { version: "0.30.0", connectorVersion: 11, support: "handshake" },
  { version: "0.31.0", connectorVersion: 13, support: "transfers", mixesUpSmallerBlocks: true },
  { version: "0.32.0", connectorVersion: 14, support: "transfers" },
  { version: "0.33.0", connectorVersion: 15, support: "transfers" },
] as const satisfies readonly VllmVersion[];

/** The described releases of vLLM, oldest first. */
export const VLLM_VERSIONS: readonly VllmVersion[] = VERSIONS;

type Release = (typeof VERSIONS)[number]["version"];

/** The first release with an entry, and the first one without it again. */
interface Range {
  readonly since?: Release;
  readonly until?: Release;
}

type Entry = string | readonly [name: string, form: string, range?: Range];

const since = (version: Release): Range => ({ since: version });
const SPECULATIVE = [
  "method",
  "model",
  "revision",
  "code_revision",
  "parallel_drafting",
  "kv_cache_dtype",
];

/**
 * A section per message, in vLLM's order. `kv-peer wire` reads the same from the sources of a
 * wheel; an entry's form is the text there.
 */
const WIRE = {
  handshake: [
    ["request", "get_meta_msg {remote_pp_rank} {remote_rank}"],
    ["reply", "{encoded_data} {ts}"],
  ],
  /** The first frame of a reply (`NixlHandshakePayload`). */
  "handshake payload": [
    ["class", "dataclass KVConnectorHandshakeMetadata"],
    ["compatibility_hash", "str"],
    ["agent_metadata_bytes", "bytes"],
  ],
  /** `NixlAgentMetadata`, type and default, as a msgpack map; msgspec ignores unknown keys. */
  "agent metadata": [
    ["class", "dataclass"],
    ["engine_id", "str"],
    ["agent_metadata", "bytes"],
    ["kv_caches_base_addr", "list[int]"],
    ["device_id", "int"],
    ["num_blocks", "int"],
    ["block_lens", "list[int]"],
    ["block_strides", "list[int]", since("0.29.0")],
    ["kv_cache_layout", "str"],
    ["block_size", "int"],
    ["ssm_sizes", "tuple[int, int]"],
    ["attn_backend_name", "str"],
    ["physical_blocks_per_logical_kv_block", "int"],
    ["region_num_blocks", "list[int] | None = None", since("0.30.0")],
    ["region_group_ids", "list[int] | None = None", since("0.30.0")],
    ["region_names", "list[str] | None = None", since("0.30.0")],
    ["region_mem_types", "list[str] | None = None", since("0.30.0")],
    ["dcp_size", "int = 1", since("0.29.0")],
    ["pcp_size", "int = 1", since("0.29.0")],
    ["ple_block_len", "int | None = None", since("0.32.0")],
    ["region_members", "list[list[str]] = field(default_factory=list)", since("0.31.0")],
    [
      "packed_member_layouts",
      "dict[str, tuple[int, int]] = field(default_factory=dict)",
      since("0.31.0"),
    ],
  ],
  /** The form is the order of the dimensions. */
  "cache layouts": [
    ["NHD", "", { until: "0.29.0" }],
    ["HND", "", { until: "0.29.0" }],
    ["LBHNC", "(0, 1, 2, 3, 4)", since("0.29.0")],
    ["LBNHC", "(0, 1, 3, 2, 4)", since("0.29.0")],
    ["LHBNC", "(0, 2, 1, 3, 4)", since("0.29.0")],
    ["BLHNC", "(1, 0, 2, 3, 4)", since("0.29.0")],
    ["BLNHC", "(1, 0, 3, 2, 4)", since("0.29.0")],
    ["BHLNC", "(1, 2, 0, 3, 4)", since("0.29.0")],
  ],
  "hash function": [["hash_factors", "hexdigest(sha256(encode(dumps(items, sort_keys=True))))"]],
  /** A factor with parts is a map. */
  "compatibility hash": [
    "vllm_version",
    "nixl_connector_version",
    "model",
    "dtype",
    "num_kv_heads",
    "head_size",
    "num_hidden_layers",
    "attn_backend_name",
    "cache_dtype",
    ["cross_layers_blocks", "", { until: "0.29.0" }],
    "is_hma_enabled",
    ["speculative_config", "", since("0.28.0")],
    ...[...SPECULATIVE, "auxiliary_layer_ids"].map(
      (part): Entry => [`speculative_config.${part}`, "", since("0.28.0")],
    ),
    ["transfer_mode", "", since("0.28.0")],
  ],
  /** Notifications of both modes, of pull, of push, with values in braces. */
  notifications: ["HB:{req_ids,…}"],
  "pull notifications": [
    ["{request_id}:{world_size}", "", { until: "0.29.0" }],
    ["{remote_request_id}:{world_size}", "", { until: "0.29.0" }],
    ["{request_id}:{local_consumers}", "", since("0.29.0")],
    ["{remote_request_id}:{expected_consumers}", "", since("0.29.0")],
  ],
  "push notifications": ["PUSH_REG:{msgpack}", "{remote_request_id}:{world_size}"],
  /** The map of a `PUSH_REG:` notification. */
  "push registration": [
    "request_id",
    "decode_engine_id",
    "decode_host",
    "decode_port",
    "decode_tp_size",
    "local_block_ids",
    "remote_engine_id",
    "remote_host",
    "remote_port",
    "remote_tp_size",
    "remote_pp_size",
  ],
  /** `kv_transfer_params` of P's answer. */
  "pull answer": [
    "do_remote_prefill",
    "do_remote_decode",
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "tp_size",
    ["dcp_size", "", since("0.29.0")],
    ["pp_size", "", since("0.29.0")],
    "remote_num_tokens",
    "remote_blocks_expiry_time",
    ["remote_registration_generation", "", since("0.33.0")],
    ["transfer_mode", "", since("0.28.0")],
  ],
  "push answer": [
    "do_remote_prefill",
    "do_remote_decode",
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "tp_size",
    ["dcp_size", "", since("0.30.0")],
    "pp_size",
    "remote_num_tokens",
    ["transfer_mode", "", since("0.28.0")],
  ],
  /** Keys that vLLM reads and writes; those with an underscore are its own marks. */
  "parameters read": [
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "tp_size",
    ["dcp_size", "", since("0.29.0")],
    "pp_size",
    "do_remote_decode",
    "do_remote_prefill",
    "_p_side_truncated",
    "remote_block_size",
    "remote_block_ids",
    "remote_blocks_expiry_time",
    "remote_num_tokens",
    ["remote_registration_generation", "", since("0.33.0")],
    "_remote_blocks_processed",
    ["prompt_token_ids", "", since("0.32.0")],
    ["remote_prefill_cached_tokens", "", since("0.31.0")],
  ],
  "parameters written": [
    "_p_side_truncated",
    "do_remote_prefill",
    "_remote_blocks_processed",
    "remote_block_ids",
    ["remote_prefill_cached_tokens", "", since("0.31.0")],
  ],
} satisfies Readonly<Record<string, readonly Entry[]>>;

/** A part of the wire, such as "agent metadata". */
export type WireSection = keyof typeof WIRE;

/** By section: names on a version's wire, each with its form, or "" where only the name counts. */
export type VllmWire = Readonly<Record<WireSection, Readonly<Record<string, string>>>>;

/** Returns the wire of a described release, in vLLM's order. */
export function vllmWire({ version }: VllmVersion): VllmWire {
  const known = wires.get(version) ?? wireOf(version);
  wires.set(version, known);
  return known;
}

const wires = new Map<string, VllmWire>();

function wireOf(version: string): VllmWire {
  const at = VERSIONS.findIndex((each) => each.version === version);
  const indexOf = (release: Release | undefined, otherwise: number) =>
    release === undefined ? otherwise : VERSIONS.findIndex((each) => each.version === release);
  const has = ({ since, until }: Range) =>
    indexOf(since, 0) <= at && at < indexOf(until, VERSIONS.length);
  const sections = Object.entries<readonly Entry[]>(WIRE).map(([section, entries]) => {
    const named = entries.map((entry) =>
      typeof entry === "string" ? ([entry, ""] as const) : entry,
    );
    const kept = named.filter(([, , range = {}]) => has(range));
    return [section, Object.fromEntries(kept.map(([name, form]) => [name, form]))];
  });
  return Object.fromEntries(sections) as VllmWire;
}

/** Returns the described release with the same major and minor number; undefined for any other. */
export function describedVersion(version: string): VllmVersion | undefined {
  const minor = /^(\d+\.\d+)(\.|$|[^\d])/.exec(version)?.[1];
  return VLLM_VERSIONS.find((each) => minor !== undefined && each.version.startsWith(`${minor}.`));
}

/** The newest described release. */
export const NEWEST_VLLM_VERSION: VllmVersion = VERSIONS[VERSIONS.length - 1] ?? VERSIONS[0];
