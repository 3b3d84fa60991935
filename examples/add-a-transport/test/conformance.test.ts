import { transportSuite } from "@kv/conformance/transport";
import { loopbackTransport } from "../src/transport.js";

transportSuite({ name: "loopback", create: async () => loopbackTransport() });
