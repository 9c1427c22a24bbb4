from tests.init.survey import main

raise SystemExit(main())
