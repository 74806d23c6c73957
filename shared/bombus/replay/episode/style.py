"""The style sheet of an episode, light and dark: of its own page, and of an element `.episode` in another page."""

FRAME = """
:root { color-scheme: light dark; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 2rem 1rem 4rem; }
footer { margin-top: 2rem; font-size: .8rem; overflow-wrap: anywhere; }
"""
EPISODE = """
.episode, .episode-frame {
  --ground: #fbfaf7; --card: #fff; --ink: #1d1c19; --soft: #6b675e; --line: #e4e0d6;
  --rare: 217, 119, 6; --up: 22, 140, 70; --down: 200, 50, 50;
}
@media (prefers-color-scheme: dark) {
  .episode, .episode-frame {
    --ground: #161512; --card: #1f1e1a; --ink: #ece9e1; --soft: #a09a8c; --line: #36332c;
    --rare: 245, 158, 11; --up: 52, 190, 110; --down: 240, 95, 95;
  }
}
.episode {
  h1 { font-size: 1.5rem; margin: 0; }
  h2 { font-size: 1.05rem; margin: 0; }
  h2 code, h3 small, .facts, footer, .key { color: var(--soft); font-weight: normal; }
  h2 code { font-size: .8rem; }
  h3 { font-size: .75rem; letter-spacing: .06em; text-transform: uppercase; color: var(--soft); margin: 0 0 .3rem; }
  h3 small { text-transform: none; letter-spacing: 0; }
  a { color: inherit; }
  .became { font-size: 1.1rem; margin: .2rem 0 1rem; }
  dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 0 0 1rem; }
  dt { color: var(--soft); }
  dd { margin: 0; overflow-wrap: anywhere; }
  fieldset { border: 1px solid var(--line); border-radius: .5rem; padding: .4rem .8rem; margin: 0; }
  legend { color: var(--soft); font-size: .8rem; padding: 0 .3rem; }
  label { margin-right: 1rem; }
  section { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; }
  section { padding: 1rem; margin-top: 1rem; }
  section:target { border-color: rgb(var(--rare)); }
  .facts { margin: .1rem 0 .8rem; font-size: .85rem; }
  article { border-left: 3px solid var(--line); padding-left: .8rem; margin: .8rem 0; }
  article.reply { border-left-color: rgb(var(--rare)); }
  pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.6 ui-monospace, monospace; }
  pre.call { color: var(--soft); margin-top: .3rem; }
  details { margin: .5rem 0; font-size: .85rem; }
  summary { cursor: pointer; color: var(--soft); }
  .t { border-radius: 2px; background: rgba(var(--rare), calc(var(--u) * .6)); }
  .t:hover { outline: 1px solid var(--ink); }
  .t.m { opacity: .5; text-decoration: underline dotted; }
  b.up { color: rgb(var(--up)); }
  b.down { color: rgb(var(--down)); }
  .note { color: var(--soft); }
}
.episode:has(#by-difference:checked) .t { background: rgba(var(--rare), calc(var(--d, 0) * .7)); }
.episode:has(#by-advantage:checked) .t { background: none; }
.episode:has(#by-advantage:checked) .t.up { background: rgba(var(--up), calc(.08 + var(--a) * .5)); }
.episode:has(#by-advantage:checked) .t.down { background: rgba(var(--down), calc(.08 + var(--a) * .5)); }
.episode:has(#by-version:checked) .t { background: hsla(calc(210 + var(--v, 0) * 150), 70%, 50%, .3); }
.episode:has(#by-mask:checked) .t { background: rgba(var(--up), .25); }
.episode:has(#by-mask:checked) .t.m { background: none; }
"""
