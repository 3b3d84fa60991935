import { FAMILIES, SERVED_UNTIL } from "../../packages/kv-plan/src/model/architectures.js";

const REFUSED: readonly (readonly [what: string, why: string])[] = [
  ["BERT, RoBERTa, ModernBERT and other encoders", "no KV cache: nothing is kept to hand over"],
  ["encoder-decoders other than Whisper", "the cache of cross attention is the encoder's"],
  [
    "any other architecture",
    "no rules: which layers have a cache, and of what shape, is not known",
  ],
  [
    "a field that may decide a cache, which the family's rules do not read",
    "it is named: `attn_…`, `linear_…`, `mamba_…`, `…_interval`, `…_pattern`, windows, chunks, shared layers and others",
  ],
  ["a TP size that does not divide the heads", "vLLM refuses it"],
];

/** The table of docs/kv-plan.md: each family of models, and whether it is planned or refused. */
export function familyTable(): string {
  const architectures = new Map<string, string[]>();
  for (const [architecture, { name }] of Object.entries(FAMILIES))
    architectures.set(name, [...(architectures.get(name) ?? []), architecture]);
  const code = (names: readonly string[]) => names.map((name) => `\`${name}\``).join(", ");
  const planned = [...architectures].map(([family, names]) =>
    family === "Whisper"
      ? [family, code(names), "its caches are known; a pair is refused: an encoder-decoder"]
      : [family, code(names), "planned"],
  );
  const gone = new Map<string, string[]>();
  for (const [architecture, version] of Object.entries(SERVED_UNTIL))
    gone.set(version, [...(gone.get(version) ?? []), architecture]);
  const removed = [...gone].map(([version, names]) => [
    `served until vLLM ${version}`,
    code(names),
    "refused: vLLM 0.33 does not serve it",
  ]);
  const other = REFUSED.map(([what, why]) => [what, "", `refused: ${why}`]);
  const rows = [
    ["family", "architectures", "planned or refused"],
    ["---", "---", "---"],
    ...planned,
    ...removed,
    ...other,
  ];
  return rows
    .map((row) => `| ${row.join(" | ")} |`)
    .join("\n")
    .concat("\n");
}
