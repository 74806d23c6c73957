// Runs the script of a page, whose HTML is the first line of stdin, as a browser would; every line is JSON.
// Stdin: {"open"}, {"message": text}, {"close": reason} of its WebSocket; {"click": id}, {"type": [id, text]} of its user.
// Stdout: {"socket": url}, {"send": text}, and after each line of stdin {"shown": what the user sees}.
import { createInterface } from "node:readline";
import vm from "node:vm";

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const next = async () => { const { value, done } = await lines.next(); return done ? null : JSON.parse(value); };
const say = (told) => process.stdout.write(JSON.stringify(told) + "\n");

const { html, host } = await next();
const element = (textContent = "") => ({
  textContent, value: textContent, children: [], className: "", disabled: false,
  prepend(child) { this.children.unshift(child); },
  replaceChildren(...children) { this.children = children; this.value = children.length ? children[0].value : ""; },
});
const byId = {};
for (const [, id, text] of html.matchAll(/<\w+ id="(\w+)"[^>]*>([^<]*)/g)) byId[id] = element(text);

let socket = null;
class WebSocket {
  constructor(url) { socket = this; say({ socket: url }); }
  send(text) { say({ send: text }); }
}
class Option { constructor(text, value) { this.text = text; this.value = value; } }
const document = { getElementById: (id) => byId[id] ?? null, createElement: () => element() };
const script = html.match(/<script>([^]*)<\/script>/)[1];
vm.runInNewContext(script, { document, WebSocket, Option, location: { protocol: "http:", host } });

for (let told = await next(); told !== null; told = await next()) {
  if ("open" in told) socket.onopen({});
  if ("message" in told) socket.onmessage({ data: told.message });
  if ("close" in told) socket.onclose({ reason: told.close });
  if ("type" in told) byId[told.type[0]].value = told.type[1];
  if ("click" in told && !byId[told.click].disabled) byId[told.click].onclick();
  say({
    shown: {
      state: byId.state.textContent,
      tools: byId.tool.children.map((option) => option.text),
      log: byId.log.children.map((line) => [line.className, JSON.parse(line.textContent)]),
    },
  });
}
