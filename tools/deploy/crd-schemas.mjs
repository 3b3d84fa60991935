// Checks objects of custom resources against the schemas in their CustomResourceDefinitions, which
// are files of Go modules. Rules in CEL are not run.
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import Ajv from "ajv";
import { parseAllDocuments } from "yaml";
import { goModule } from "../setup/go-tools.mjs";

// The versions that Envoy AI Gateway 1.0 and Envoy Gateway 1.8 are built with.
const SOURCES = [
  ["sigs.k8s.io/gateway-api@v1.5.1", "config/crd/standard"],
  ["sigs.k8s.io/gateway-api-inference-extension@v1.5.0", "config/crd/bases"],
  ["github.com/envoyproxy/gateway@v1.8.1", "charts/gateway-helm/charts/crds/crds/generated"],
  ["github.com/prometheus-operator/prometheus-operator@v0.85.0", "example/prometheus-operator-crd"],
];

/**
 * An object with members that its schema does not name is refused, as by
 * `kubectl --validate=strict`.
 */
function closed(schema) {
  if (Array.isArray(schema)) return schema.map(closed);
  if (typeof schema !== "object" || schema === null) return schema;
  const copy = Object.fromEntries(
    Object.entries(schema).map(([key, value]) => [key, closed(value)]),
  );
  const isOpen =
    schema["x-kubernetes-preserve-unknown-fields"] === true || "additionalProperties" in schema;
  if (typeof schema.properties === "object" && !isOpen) copy.additionalProperties = false;
  return copy;
}

/** Patterns are Go's, where `(?i)` stands for a flag of JavaScript's. */
function goPattern(pattern, flags) {
  const plain = pattern.replace("(?i)", "");
  return new RegExp(plain, plain === pattern ? flags : `${flags}i`);
}
goPattern.code = "";

/** Returns a function that says what is wrong with an object: undefined for nothing. */
export async function crdValidator() {
  const ajv = new Ajv({
    strict: false,
    validateFormats: false,
    allErrors: true,
    code: { regExp: goPattern },
  });
  const schemas = new Map();
  for (const [module, folder] of SOURCES) {
    const place = join(await goModule(module), folder);
    for (const name of readdirSync(place)) {
      for (const document of parseAllDocuments(readFileSync(join(place, name), "utf8"))) {
        const { kind, spec } = document.toJS() ?? {};
        if (kind !== "CustomResourceDefinition") continue;
        for (const version of spec.versions) {
          const { metadata: _, ...properties } = version.schema.openAPIV3Schema.properties;
          const schema = closed({ ...version.schema.openAPIV3Schema, properties });
          schema.properties.metadata = { type: "object", required: ["name"] };
          schemas.set(`${spec.group}/${version.name} ${spec.names.kind}`, schema);
        }
      }
    }
  }
  return (object) => {
    const name = `${object.apiVersion} ${object.kind}`;
    const schema = schemas.get(name);
    if (schema === undefined) return `${name} has no schema`;
    return ajv.validate(schema, object)
      ? undefined
      : ajv.errorsText(undefined, { dataVar: name, separator: "\n" });
  };
}
