// A long suite: reads the wire from trees of vLLM with Python.

import { execFileSync } from "node:child_process";
import {
  cpSync,
  existsSync,
  mkdirSync,
  readFileSync,
  rmSync,
  symlinkSync,
  writeFileSync,
} from "node:fs";
import { homedir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { someOf } from "@kv/testing/long-run";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { expect, test, vi } from "vitest";
import { checkDigest, compareWire, wireText } from "../src/wire/compare-wire.js";
import { readWire } from "../src/wire/read-wire.js";
import CHECKS from "../src/wire/vllm-checks.json" with { type: "json" };
import { runKvPeer } from "./run-kv-peer.js";

const sample = fileURLToPath(new URL("./fixtures/vllm-tree", import.meta.url));
const NIXL = "vllm/distributed/kv_transfer/kv_connector/v1/nixl";
const METADATA = `${NIXL}/metadata.py`;
const SCHEDULER = `${NIXL}/scheduler.py`;
const WORKER = `${NIXL}/worker.py`;
const COMPLETION = "vllm/entrypoints/openai/completion/protocol.py";
const MESSAGES = "vllm/entrypoints/anthropic/protocol.py";
const ENGINE = "vllm/v1/engine/__init__.py";

const work = scratchFolder();

let trees = 0;
/** A copy of the sample tree in which `from` is replaced by `to`. */
function altered(file: string, from: string | RegExp, to: string): string {
  trees += 1;
  const tree = join(work, `tree-${trees}`);
  cpSync(sample, tree, { recursive: true });
  const source = readFileSync(join(tree, file), "utf8");
  const changed = source.replace(from, to);
  expect(changed).not.toBe(source);
  writeFileSync(join(tree, file), changed);
  return tree;
}

const python = (script: string, ...args: string[]) =>
  execFileSync("python3", ["-c", script, ...args]);

function wheelOf(tree: string): string {
  const wheel = `${tree}.whl`;
  execFileSync("python3", ["-m", "zipfile", "-c", wheel, join(tree, "vllm")]);
  return wheel;
}

const reportOf = async (path: string) => compareWire(await readWire(path));

test("a tree and a wheel with the wire of a described version have no difference", async () => {
  const wheel = wheelOf(other());
  for (const path of [sample, join(sample, "vllm"), wheel]) {
    const report = await reportOf(path);
    expect(report).toMatchObject({ vllm: "0.33.0", connectorVersion: 15, differences: [] });
    expect(wireText(report)).toMatch(/\nok: the wire is that of 0\.33\.0\n$/);
  }
});

test.each(
  someOf(
    [
      [
        "a field renamed",
        METADATA,
        "block_strides:",
        "block_steps:",
        "renamed  agent metadata  block_strides is now block_steps",
      ],
      [
        "a field added",
        METADATA,
        "pcp_size: int = 1",
        "pcp_size: int = 1\n    scales: list[float] | None = None",
        "added    agent metadata  scales (list[float] | None = None)",
      ],
      [
        "a required field added",
        METADATA,
        "pcp_size: int = 1",
        "scales: list[float]\n    pcp_size: int = 1",
        "scales (list[float])\n         means: it is required",
      ],
      [
        "a field retyped",
        METADATA,
        "tuple[int, int]\n    attn",
        "list[int]\n    attn",
        "changed  agent metadata  ssm_sizes is list[int], was tuple[int, int]",
      ],
      [
        "another default",
        METADATA,
        "dcp_size: int = 1",
        "dcp_size: int = 0",
        "changed  agent metadata  dcp_size is int = 0, was int = 1",
      ],
      [
        "a field removed",
        METADATA,
        /\n +num_blocks: int/,
        "",
        "removed  agent metadata  num_blocks (int)\n         means: other versions require it",
      ],
      [
        "a map that becomes a list",
        METADATA,
        "@dataclass\nclass NixlAgentMetadata",
        "class NixlAgentMetadata(msgspec.Struct, array_like=True)",
        "class is msgspec.Struct array_like=True, was dataclass",
      ],
      [
        "a class of another name",
        METADATA,
        /NixlAgentMetadata(.*[^$])block_size: int/s,
        "RankMetadata$1page_size: int",
        "renamed  agent metadata  block_size is now page_size",
      ],
      [
        "a field of the payload",
        METADATA,
        "agent_metadata_bytes: bytes",
        "rank_metadata: bytes",
        "renamed  handshake payload  agent_metadata_bytes is now rank_metadata",
      ],
      [
        "a hash factor added",
        METADATA,
        '"transfer_mode": mode,',
        '"transfer_mode": mode, "rope": 1,',
        "added    compatibility hash  rope",
      ],
      [
        "a hash factor added by a statement",
        METADATA,
        "return hash_factors",
        'factors["rope"] = 1\n    return hash_factors',
        "added    compatibility hash  rope",
      ],
      [
        "hash factors merged",
        METADATA,
        "return hash_factors",
        "factors |= more\n    return hash_factors",
        "added    compatibility hash  **more",
      ],
      [
        "hash factors updated",
        METADATA,
        "return hash_factors",
        "factors.update(rope=1)\n    return hash_factors",
        "added    compatibility hash  rope",
      ],
      [
        "a part of a hash factor",
        METADATA,
        '"revision"',
        '"commit"',
        "renamed  compatibility hash  speculative_config.revision is now speculative_config.commit",
      ],
      [
        "another hash function",
        "vllm/config/utils.py",
        "hashlib.sha256",
        "hashlib.blake2b",
        "hash function  hash_factors is hexdigest(blake2b(",
      ],
      ["sorted keys", "vllm/config/utils.py", ", sort_keys=True", "", "dumps(items))))"],
      [
        "the connector version",
        METADATA,
        "VERSION: int = 15",
        "VERSION: int = 16",
        "changed  connector  NIXL_CONNECTOR_VERSION is 16, was 15",
      ],
      [
        "the marker of a handshake",
        METADATA,
        'b"get_meta_msg"',
        'b"get_meta_v2"',
        "request is get_meta_v2 {remote_pp_rank} {remote_rank}",
      ],
      [
        "a third frame",
        SCHEDULER,
        ", ts))",
        ", ts, nonce))",
        "reply is {encoded_data} {ts} {nonce}, was {encoded_data} {ts}",
      ],
      [
        "a separator of heartbeats",
        WORKER,
        '","',
        '";"',
        "notifications  HB:{req_ids,…} is now HB:{req_ids;…}",
      ],
      [
        "a notification of its own",
        WORKER,
        "def write",
        'def fail(self, agent, r):\n        self.nixl.send_notif(agent, f"FAIL:{r}")\n\n    def write',
        "added    push notifications  FAIL:{r}",
      ],
      [
        "the prefix of registrations",
        METADATA,
        'b"PUSH_REG:"',
        'b"PUSH2:"',
        "PUSH_REG:{msgpack} is now PUSH2:{msgpack}",
      ],
      [
        "a key of registrations",
        SCHEDULER,
        '"decode_tp_size": self.tp_size,',
        '"decode_tp_size": 1, "decode_pp_size": 1,',
        "added    push registration  decode_pp_size",
      ],
      [
        "a key of P's answer, pull",
        SCHEDULER,
        "remote_engine_id=",
        "engine_id=",
        "renamed  pull answer  remote_engine_id is now engine_id",
      ],
      [
        "a key of P's answer, push",
        SCHEDULER,
        /"tp_size": self.tp_size/,
        '"tp": self.tp_size',
        "renamed  push answer  tp_size is now tp",
      ],
      [
        "a key of P's answer, set later",
        SCHEDULER,
        "return True, answer",
        'answer["nonce"] = 1\n        return True, answer',
        "added    push answer  nonce",
      ],
      [
        "a parameter that is read",
        METADATA,
        "dcp=kv",
        'x=kv_transfer_params.get("remote_scales"), dcp=kv',
        "added    parameters read  remote_scales",
      ],
      [
        "a cache layout",
        "vllm/v1/kv_cache_layout.py",
        "BHLNC =",
        "BHNLC =",
        "renamed  cache layouts  BHLNC is now BHNLC",
      ],
      [
        "a member of a request",
        COMPLETION,
        "    vllm_xargs: Any = None\n",
        "    vllm_xargs: Any = None\n    kv_route: Any = None\n",
        "added  request /v1/completions  kv_route\n  means: kv-proxy sends it to P and to D as it comes",
      ],
      [
        "another name of a member",
        MESSAGES,
        "    vllm_xargs: Any = None\n",
        '    vllm_xargs: Any = Field(None, validation_alias=AliasChoices("vllm_xargs", "xargs"))\n',
        "added  request /v1/messages  xargs",
      ],
      [
        "a member that is gone",
        MESSAGES,
        "    metadata: Any = None\n",
        "",
        "removed  request /v1/messages  metadata\n  means: this version ignores it in requests",
      ],
      [
        "a request class of another name",
        MESSAGES,
        "class AnthropicMessagesRequest",
        "class MessagesRequest",
        "missing  request /v1/messages  all entries not found in the sources",
      ],
      [
        "a field of requests to the engine",
        ENGINE,
        "    kv_hints: Any = None\n",
        "    kv_hints: Any = None\n    kv_route: Any = None\n",
        "added  engine request  kv_route",
      ],
      [
        "an extra argument that the engine reads",
        "vllm/v1/core/diffusion.py",
        'extra.get("diffusion_canvas_length")',
        'extra.get("diffusion_canvas_length") or "kv_peer" in params.extra_args',
        "added  extra arguments read  kv_peer\n  means: a client may set it in vllm_xargs",
      ],
      [
        "a member that becomes an extra argument",
        COMPLETION,
        "        if self.ec_transfer_params:\n",
        '        if self.suffix:\n            extra_args["kv_peer"] = self.suffix\n        if self.ec_transfer_params:\n',
        "added  extra arguments written  kv_peer",
      ],
      [
        "a member that becomes all extra arguments",
        COMPLETION,
        "self.vllm_xargs if self.vllm_xargs else {}",
        "self.vllm_xargs if self.vllm_xargs else self.suffix",
        "added  extra arguments written  **suffix",
      ],
      [
        "the order of a layout",
        "vllm/v1/kv_cache_layout.py",
        "(1, 2, 0, 3, 4)",
        "(1, 2, 3, 0, 4)",
        "BHLNC is (1, 2, 3, 0, 4), was (1, 2, 0, 3, 4)",
      ],
      [
        "an unknown dict of hash factors",
        METADATA,
        /factors = \{[^}]*\}/,
        "factors = collect(config)",
        "missing  compatibility hash",
      ],
      [
        "no agent metadata",
        METADATA,
        /class NixlAgentMetadata.*?default_factory=dict\)/s,
        "class Other:\n    pass",
        "missing  agent metadata      all entries not found in the sources",
      ],
    ] as const,
    4,
  ),
)("%s is one difference, and the report names it", async (_, file, from, to, line) => {
  const report = await reportOf(altered(file, from, to));
  const text = wireText(report).replace(/ {2,}/g, "  ");
  expect(text).toContain(line.replace(/ {2,}/g, "  "));
  expect(report.comparedWith.version).toBe("0.33.0");
  expect(report.differences).toHaveLength(1);
});

test.each([
  [
    "pull notifications",
    WORKER,
    "{expected_consumers}",
    "{self.world_size}",
    "{remote_request_id}:{expected_consumers}",
    "{remote_request_id}:{world_size}",
  ],
  [
    "parameters written",
    "vllm/v1/core/scheduler.py",
    '["remote_prefill_cached_tokens"] =',
    '["cached"] =',
    "remote_prefill_cached_tokens",
    "cached",
  ],
])(
  "%s have no order: one is removed, and another is added",
  async (section, file, from, to, old, now) => {
    const { differences } = await reportOf(altered(file, from, to));
    expect(differences).toEqual([
      { section, name: old, change: "removed", before: "" },
      { section, name: now, change: "added", after: "" },
    ]);
  },
);

test("a member that a request inherits is found, and those of releases whose requests are not described are not compared", async () => {
  const base = altered(
    "vllm/entrypoints/openai/engine/protocol.py",
    "class OpenAIBaseModel(BaseModel):\n",
    "class Routed(BaseModel):\n    kv_route: str = ''\n\n\nclass OpenAIBaseModel(Routed):\n",
  );
  const { differences } = await reportOf(base);
  expect(differences.map(({ section, name, change }) => [section, name, change])).toEqual(
    ["/v1/completions", "/v1/chat/completions", "/v1/responses"].map((route) => [
      `request ${route}`,
      "kv_route",
      "added",
    ]),
  );
  const older = altered("vllm/_version.py", "0.33.0", "0.30.0");
  const sections = (await reportOf(older)).differences.map(({ section }) => section);
  expect(sections.filter((section) => /request|extra/.test(section))).toEqual([]);
});

test("sources without an API server have no requests to compare, and the report says so", async () => {
  const tree = other();
  rmSync(join(tree, "vllm/entrypoints"), { recursive: true });
  const report = await reportOf(tree);
  expect(report).toMatchObject({ differences: [], requestsCompared: false });
  expect(wireText(report)).toContain("clients' requests were not compared");
});

test("a new release is compared with the most similar described one, and a release without its number too", async () => {
  const release = await reportOf(altered("vllm/_version.py", "0.33.0", "0.99.0"));
  expect(release).toMatchObject({
    vllm: "0.99.0",
    comparedWith: { version: "0.33.0" },
    differences: [],
  });
  const older = altered(METADATA, "VERSION: int = 15", "VERSION: int = 14");
  rmSync(join(older, "vllm/_version.py"));
  for (const [from, to] of [
    [SCHEDULER, /.*remote_registration_generation.*\n/],
    [METADATA, /.*remote_registration_generation.*\n/],
  ] as const) {
    const file = join(older, from);
    writeFileSync(file, readFileSync(file, "utf8").replace(to, ""));
  }
  expect(await reportOf(older)).toMatchObject({
    vllm: null,
    comparedWith: { version: "0.32.0" },
    differences: [],
  });
});

test("field.md P2: a new raise or assert in a function of the connector is reported with its place; one that a release has is not", async () => {
  const check =
    'if meta.block_size > 99:\n            raise ValueError(f"blocks of {meta.block_size}")';
  const known = "assert self.transfer_topo is not None";
  const code = `\n\nclass NixlBaseConnectorWorker:\n    def _validate_remote_agent_handshake(self, meta):\n        ${known}\n        ${check}\n        raise\n`;
  const tree = altered(WORKER, /$/, code);
  const renamed = join(tree, NIXL, "base_worker.py");
  cpSync(join(tree, WORKER), renamed);
  const { differences } = await reportOf(tree);
  const checks = differences.filter(({ section }) => section === "check");
  // The file of the sample is not vLLM's: there both are new.
  expect(checks.map(({ name }) => name)).toEqual([
    "base_worker.py NixlBaseConnectorWorker._validate_remote_agent_handshake: raise ValueError(f'blocks of {meta.block_size}')",
    `worker.py NixlBaseConnectorWorker._validate_remote_agent_handshake: ${known}`,
    "worker.py NixlBaseConnectorWorker._validate_remote_agent_handshake: raise ValueError(f'blocks of {meta.block_size}')",
  ]);
  const { code: exitCode, stdout } = await runKvPeer(`wire ${tree}`);
  expect(stdout).toMatch(
    /added +check +base_worker\.py NixlBase\S+: raise ValueError.*\n +means: this version may refuse a pair/,
  );
  expect(exitCode).toBe(1);
});

const peer = process.env.KV_PEER_DIR ?? join(homedir(), ".cache/kv-peer");
test.skipIf(!existsSync(join(peer, "vllm33")))(
  "field.md P2: vllm-checks.json has every check of the installed vLLM 0.33",
  async () => {
    const { checks } = await readWire(join(peer, "vllm33"));
    expect(checks.length).toBeGreaterThan(200);
    const recorded = CHECKS["0.33.0"].split(" ");
    expect([...new Set(checks.map(checkDigest))].sort()).toEqual(recorded);
  },
);

test("text of a wheel is shown without control characters", async () => {
  const tree = altered(
    METADATA,
    '"transfer_mode": mode,',
    '"transfer_mode": mode, "\\x1b[2J\\nx": 1,',
  );
  const { stdout } = await runKvPeer(`wire ${tree}`);
  expect(stdout).toContain(" \\u001b[2J x\n");
});

test("nothing of the tree or of the current folder is executed", async () => {
  const marker = join(work, "executed");
  const statement = `open(${JSON.stringify(marker)}, "w")`;
  const tree = altered(METADATA, "from dataclasses", `${statement}\nfrom dataclasses`);
  for (const name of ["ast.py", "json.py", "sitecustomize.py", "vllm/__init__.py"])
    writeFileSync(join(tree, name), statement);
  const before = process.cwd();
  try {
    process.chdir(tree);
    vi.stubEnv("PYTHONPATH", tree);
    expect((await reportOf(".")).differences).toEqual([]);
  } finally {
    process.chdir(before);
    vi.unstubAllEnvs();
  }
  expect(existsSync(marker)).toBe(false);
});

const BIG = "5 * 2**20";
const other = () => altered(METADATA, "raise ImportError", "raise SystemExit");
function damagedWheel(damage: (bytes: Buffer) => Buffer): string {
  const wheel = wheelOf(other());
  writeFileSync(wheel, damage(readFileSync(wheel)));
  return wheel;
}
const zip = (name: string, script: string) => {
  const file = join(work, name);
  python(
    `import zipfile, sys, warnings\nwarnings.simplefilter("ignore")\nz = zipfile.ZipFile(sys.argv[1], "w", zipfile.ZIP_DEFLATED)\n${script}\nz.close()`,
    file,
  );
  return file;
};

test.each(
  someOf<[string, () => string, string]>(
    [
      ["nothing there", () => join(work, "nothing"), "does not exist"],
      ["a text file", () => join(sample, METADATA), "is not a readable wheel"],
      ["a folder without vLLM", () => join(sample, ".."), `has no ${NIXL}`],
      ["a zip without vLLM", () => zip("other.whl", 'z.writestr("x.py", "")'), `has no ${NIXL}`],
      [
        "a file that decompresses to more than the limit",
        () => zip("bomb.whl", `z.writestr("${METADATA}", b" " * (${BIG}))`),
        "is larger than 4194304 bytes",
      ],
      [
        "many files that are larger than the limit together",
        () =>
          zip("many.whl", `for i in range(40): z.writestr(f"${NIXL}/x{i}.py", b" " * (4 * 2**20))`),
        "larger than 134217728 bytes",
      ],
      [
        "too many entries",
        () =>
          zip("entries.whl", 'for i in range(100_001): z.writestr(zipfile.ZipInfo(f"{i}"), "")'),
        "has 100001 entries",
      ],
      [
        "two files of one name",
        () => zip("twice.whl", `z.writestr("${METADATA}", "")\nz.writestr("${METADATA}", "")`),
        `has two entries ${METADATA}`,
      ],
      [
        "a damaged wheel",
        () => damagedWheel((bytes) => bytes.fill(0xff, 300, 3000)),
        "is not a readable wheel",
      ],
      [
        "half a wheel",
        () => damagedWheel((bytes) => bytes.subarray(0, 2000)),
        "is not a readable wheel",
      ],
      [
        "a syntax error",
        () => altered(METADATA, "engine_id: str", "engine_id str"),
        `${METADATA}: Python `,
      ],
      [
        "deep nesting",
        () => altered(METADATA, "config.hma", `${"(".repeat(5000)}1${")".repeat(5000)}`),
        `${METADATA}: Python `,
      ],
    ],
    4,
  ),
)("%s is refused by name", async (_, input, message) => {
  await expect(readWire(input())).rejects.toMatchObject({
    code: "KV_CONFIG_INVALID",
    message: expect.stringContaining(message),
  });
});

test("a device in the place of a source file is not read", async () => {
  const tree = altered(METADATA, "VERSION: int = 15", "VERSION: int = 16");
  rmSync(join(tree, METADATA));
  symlinkSync("/dev/zero", join(tree, METADATA));
  expect((await reportOf(tree)).differences).toContainEqual(
    expect.objectContaining({ section: "agent metadata", change: "missing" }),
  );
});

test("without python3 the error says what to install", async () => {
  vi.stubEnv("PATH", work);
  await expect(readWire(sample)).rejects.toMatchObject({
    code: "KV_CONFIG_INVALID",
    hint: expect.stringContaining("install Python"),
  });
  vi.unstubAllEnvs();
});

test("the command exits with 0 for a known wire, 1 for a difference and 2 for bad input, and prints JSON", {
  timeout: 60_000,
}, async () => {
  mkdirSync(join(work, "empty"));
  const changed = altered(METADATA, "VERSION: int = 15", "VERSION: int = 16");
  const [known, differs, bad] = await Promise.all([
    runKvPeer(`wire ${sample}`),
    runKvPeer(`wire ${changed} --json`),
    runKvPeer(`wire ${join(work, "empty")}`),
  ]);
  expect(known.code).toBe(0);
  expect(differs.code).toBe(1);
  expect(JSON.parse(differs.stdout)).toMatchObject({
    connectorVersion: 16,
    comparedWith: { version: "0.33.0" },
    differences: [
      {
        section: "connector",
        name: "NIXL_CONNECTOR_VERSION",
        change: "changed",
        before: "15",
        after: "16",
      },
    ],
  });
  expect(bad.code).toBe(2);
  expect(bad.stderr).toContain("[KV_CONFIG_INVALID]");
});
