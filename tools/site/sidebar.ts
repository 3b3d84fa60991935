import type { Page } from "./pages.js";

interface Group {
  readonly text: string;
  readonly collapsed?: boolean;
  readonly items: readonly { readonly text: string; readonly link: string }[];
}

/** In the order in which a reader needs it. site.long.test.ts compares it with the pages. */
const GROUPS: readonly (readonly [group: string, pages: Readonly<Record<string, string>>])[] = [
  [
    "Get started",
    {
      overview: "What it is",
      "get-started/run-vllm": "You run vLLM",
      "get-started/build-an-engine": "You build an engine",
      "get-started/nixl-in-node": "You want NIXL in Node",
    },
  ],
  [
    "Operate",
    {
      "operate/choose-a-front-end": "Choose a front end",
      "operate/install": "Image, chart, systemd unit",
      "operate/verify": "Is it really disaggregated?",
      configuration: "Configuration",
      metrics: "Metrics",
      migration: "Migration",
      readback: "The next turn, read back",
      "operate/kv-pool": "KV that outlives its engine",
      "operate/failing-instances": "When an instance fails",
      "operate/fleet-sizes": "Sizes of a fleet",
      "operate/host-process": "What NIXL does to its process",
    },
  ],
  [
    "Recipes",
    {
      "recipes/pair-with-vllm": "Pair with vLLM",
      "recipes/replace-the-toy-proxy": "Replace the toy proxy",
      "recipes/gate-an-upgrade": "Gate an upgrade in CI",
      "recipes/efa": "AWS EFA",
      "how-to/run-on-neuron": "AWS Neuron",
      "recipes/air-gapped": "Air-gapped hosts",
      "recipes/bundlers": "Bundlers and containers",
    },
  ],
  [
    "What works",
    {
      compatibility: "Compatibility",
      "vllm-versions": "vLLM versions",
      parity: "NixlConnector, row by row",
      "vllm-documents": "vLLM's documents, row by row",
      "cache-kinds": "Cache kinds",
      "field-reports": "Known bugs of the field",
      "tested-where": "Tested where",
      "node-versions": "Node versions",
    },
  ],
  [
    "Look up",
    {
      troubleshooting: "Troubleshooting",
      errors: "Errors",
      glossary: "Glossary",
      "kv-plan": "kv-plan",
      architectures: "Architectures",
      security: "Security",
    },
  ],
  [
    "Extend",
    {
      architecture: "Architecture",
      "how-to/add-a-connector": "Add a connector",
      "how-to/add-a-transport": "Add a transport",
      "how-to/add-a-platform": "Add a platform",
      "how-to/add-a-cache-kind": "Add a kind of cache",
      contributing: "Contributing",
      releasing: "Releasing",
    },
  ],
  [
    "Designs",
    {
      "design/push": "Push",
      "design/staging": "Staging",
      "design/state-machines": "State machines",
      "design/mutation": "Mutation tests",
    },
  ],
  [
    "Measured",
    {
      "bench/pull": "Pull",
      "bench/push-vs-pull": "Push against pull",
      "bench/multi-turn": "Further turns, read back",
      "bench/nixl": "@kv/nixl",
      "bench/arena": "Routers, side by side",
      "bench/growth": "How costs grow",
    },
  ],
];

export function sidebarOf(pages: readonly Page[]): readonly Group[] {
  const packages = pages.flatMap(({ target }) => /^packages\/(.+)\.md$/.exec(target)?.[1] ?? []);
  return [
    ...GROUPS.map(([text, items]) => ({
      text,
      items: Object.entries(items).map(([page, name]) => ({ text: name, link: `/${page}` })),
    })),
    {
      text: "Packages",
      collapsed: true,
      items: packages.map((name) => ({
        text: name === "demo" ? "the reference app" : `@kv/${name}`,
        link: `/packages/${name}`,
      })),
    },
  ];
}
