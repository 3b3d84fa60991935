import { platformSuite } from "@kv/conformance/platform";
import { cpuPlatform } from "@kv/connector";

platformSuite({ name: "cpu", create: cpuPlatform });
