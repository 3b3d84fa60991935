import {
  ARCHITECTURES,
  type DraftMethod,
  familyOfRule,
} from "../../packages/kv-plan/src/model/architectures.js";

const DRAFTS: Readonly<Record<DraftMethod, string>> = {
  eagle: "EAGLE: a head of Llama's layers (`EagleLlamaForCausalLM`)",
  eagle3: "EAGLE 3: a head of Llama's layers (`LlamaForCausalLMEagle3`, `Eagle3LlamaForCausalLM`)",
  mtp: "Multi-token prediction: the checkpoint's own layers",
};

type Rows = readonly (readonly [name: string, what: string])[];

/** docs/architectures.md: each architecture of the release, and what else is refused. */
export function architecturesPage(): string {
  const { release, architectures, refused, servedUntil, others } = ARCHITECTURES;
  const planned = Object.entries(architectures).map(([name, learned]) => {
    const family = familyOfRule(learned).name;
    const note = family === "Whisper" ? "; a pair is refused: an encoder-decoder" : "";
    return [name, `${family}${note}`] as const;
  });
  const beside = Object.entries(architectures).flatMap(([name, { drafts = [] }]) =>
    drafts.map((method) => [name, DRAFTS[method]] as const),
  );
  const unknown = Object.entries(refused).map(([name, why]) => {
    // What vLLM said is a code span.
    const [, ours = why, said] = /^(.*?) \((.*)\)$/.exec(why.replaceAll(/[|<>`]/g, "")) ?? [];
    return [name, said === undefined ? ours : `${ours}: \`${said}\``] as const;
  });
  return `# Architectures of vLLM ${release}

What [\`kv-plan --config\`](kv-plan.md) does with each.

## Planned

In each answer of \`tools/conformance/fixtures\` the caches are those that vLLM's own code makes.

${table("caches", planned)}
## With a draft (\`--draft\`)

${table("draft", beside)}
## Refused by name

Beside the architectures of the table:

- A field's value that these answers do not show, where it may decide a cache.
- A TP size that does not divide the heads, as vLLM refuses it.
- ${Object.keys(servedUntil).length} architectures that only an older vLLM serves, and ${others.length} that generate no text.

${table("reason", unknown)}`;
}

function table(what: string, rows: Rows): string {
  const reasons = [...new Set(rows.map(([, said]) => said))].sort();
  const lines = reasons.map((reason) => {
    const names = rows.flatMap(([name, said]) => (said === reason ? `\`${name}\`` : []));
    return `| ${reason} | ${names.join("; ")} |\n`;
  });
  return `| ${what} | architectures |\n| --- | --- |\n${lines.join("")}`;
}
