// npm run chart [-- FOLDER]: builds the Helm chart, by default into build/chart, and prints its
// archive. Its templates are the shapes of deploy/ as kustomize builds them, with values in the
// places that differ from one cluster to the next.
import { spawnSync } from "node:child_process";
import { cpSync, mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { parse, parseAllDocuments, stringify } from "yaml";
import { goTool } from "../setup/go-tools.mjs";
import { root } from "../setup/setup.mjs";
import { build, fetchKustomize, SHAPES } from "./kustomize.mjs";

export const { find: findHelm, fetch: fetchHelm } = goTool({
  name: "helm",
  version: "3.22.0",
  source: "helm.sh/helm/v3/cmd/helm",
  probe: ["version"],
});

const IMAGES = ["vllm", "kv-proxy", "kv-epp"];
const ROLES = ["prefill", "decode"];
const FRONT_ENDS = ["kv-proxy", "kv-epp"];

/** What stands in an object until it is text. */
const place = (expression) => `@@${expression}@@`;

/** Puts values in place of what a shape has. */
function withValues(object) {
  const { kind, metadata, spec, data } = object;
  if (kind === "ConfigMap" && data.MODEL !== undefined) data.MODEL = place("model");
  if (kind === "ConfigMap" && data["config.json"] !== undefined) {
    const group = metadata.name.startsWith("kv-sidecar-") ? "sidecar" : "frontEnd";
    const own = JSON.stringify(JSON.parse(data["config.json"]));
    data["config.json"] = place(`config ${group} ${own}`);
  }
  for (const labels of [metadata.labels, spec?.template?.metadata.labels])
    if (labels?.["kv-revision"] !== undefined) labels["kv-revision"] = place("revision");
  if (kind !== "Deployment") return object;

  const { containers, initContainers = [] } = spec.template.spec;
  for (const container of [...containers, ...initContainers]) {
    const name = IMAGES.find((image) => container.image.replace(/:[^:]*$/, "").includes(image));
    container.image = place(`image ${name}`);
  }
  // Pods are replaced when a value changes that they read from a ConfigMap.
  spec.template.metadata.annotations = { "checksum/values": place("checksum") };
  const { name } = metadata;
  if (FRONT_ENDS.includes(name)) spec.replicas = place("replicas frontEnd");
  if (!ROLES.includes(name)) return object;
  spec.replicas = place(`replicas ${name}`);
  const vllm = containers.find((container) => container.name === "vllm");
  vllm.args.push(place(`args ${name}`));
  vllm.resources = place(`resources ${name} ${JSON.stringify(vllm.resources)}`);
  return object;
}

/** The template of a place. `indent`: that of its line. */
const TEMPLATES = {
  model: () => "{{ .Values.model | quote }}",
  revision: () => "{{ .Values.revision | quote }}",
  checksum: () => "{{ .Values | toJson | sha256sum }}",
  image: ([name]) => `{{ index .Values.images "${name}" | quote }}`,
  replicas: ([group]) => `{{ .Values.${group}.replicas }}`,
  resources: ([role, own], indent) =>
    `{{- .Values.${role}.resources | default (fromJson ${goString(own)}) | toYaml | nindent ${indent + 2} }}`,
  config: ([group, own]) =>
    `{{ mergeOverwrite (fromJson ${goString(own)}) .Values.${group}.config | toJson | quote }}`,
};

const goString = (text) => `\`${text}\``;

/** The text of a template, with the places filled. */
function templateOf(object) {
  return stringify(withValues(object), { lineWidth: 0 }).replaceAll(
    /^( *)(.*?)(["']?)@@(.*)@@\3$/gm,
    (_line, spaces, before, quote, escaped) => {
      const expression = quote === '"' ? JSON.parse(`"${escaped}"`) : escaped.replaceAll("''", "'");
      const [name, ...rest] = expression.split(" ");
      if (name === "args") {
        const item = `${spaces}- {{ . | quote }}`;
        return `${spaces}{{- range .Values.${rest[0]}.args }}\n${item}\n${spaces}{{- end }}`;
      }
      const parts = [rest[0], rest.slice(1).join(" ")];
      return `${spaces}${before}${TEMPLATES[name](parts, spaces.length)}`;
    },
  );
}

/** Writes the chart into a folder `kv` of `folder`. Returns it. */
export async function writeChart(folder) {
  const kustomize = await fetchKustomize();
  const chart = join(folder, "kv");
  rmSync(chart, { recursive: true, force: true });
  cpSync(join(root, "deploy/chart"), chart, { recursive: true });
  mkdirSync(join(chart, "files"));
  const monitoring = join(root, "packages/proxy/deploy/monitoring");
  for (const name of ["alerts.yaml", "dashboard.json"])
    cpSync(join(monitoring, name), join(chart, "files", name));
  const monitors = join(root, "deploy/components/monitoring/pod-monitors.yaml");
  cpSync(monitors, join(chart, "files/pod-monitors.yaml"));

  for (const shape of SHAPES) {
    const objects = parseAllDocuments(build(kustomize, `deploy/${shape}`));
    const text = objects.map((object) => templateOf(object.toJS())).join("---\n");
    const template = `{{- if eq .Values.shape "${shape}" }}\n${text}{{- end }}\n`;
    writeFileSync(join(chart, `templates/${shape}.yaml`), template);
  }

  const { version } = JSON.parse(readFileSync(join(root, "packages/proxy/package.json"), "utf8"));
  const about = parse(readFileSync(join(chart, "Chart.yaml"), "utf8"));
  writeFileSync(join(chart, "Chart.yaml"), stringify({ ...about, version, appVersion: version }));
  return chart;
}

/** The manifests that Helm makes of a chart. `values`: such as `prefill.replicas=2`. */
export function render(helm, chart, values) {
  const given = values.flatMap((value) => ["--set", value]);
  const { status, stdout, stderr } = spawnSync(
    helm,
    ["template", "kv", chart, "--kube-version", "1.37", ...given],
    { encoding: "utf8", maxBuffer: 8 << 20 },
  );
  if (status !== 0) throw new Error(`helm template ${values}: ${stderr.trim()}`);
  return stdout;
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const folder = resolve(root, process.argv[2] ?? "build/chart");
  mkdirSync(folder, { recursive: true });
  const chart = await writeChart(folder);
  const { version } = parse(readFileSync(join(chart, "Chart.yaml"), "utf8"));
  const archive = join(folder, `kv-${version}.tgz`);
  const { status, stderr } = spawnSync("tar", ["-czf", archive, "-C", folder, "kv"]);
  if (status !== 0) throw new Error(`tar ended with ${status}: ${stderr}`);
  process.stdout.write(`${archive}\n`);
}
